"""Attacks on the workers that read hostile text: texts by the hundred in families, and code that got inside one."""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from extras import needs
from hostile import ANSWERS
from test_workers import ROOT

from problems import seal, verifiers
from problems.workers import Pool
from tasks import rg

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS holds by its sandbox, another table")
PLANTED = Path(tempfile.gettempdir()) / f"gwen-attack-{os.getpid()}"  # what an attack that runs would make
KEY = "canary-of-the-judge"

# ---- texts, by family

_CALLS = [f"open('{PLANTED}','w')", f"__import__('os').system('touch {PLANTED}')", "eval('1')", "exec('x=1')"]
_WALKS = """
__class__.__base__.__subclasses__() __class__.__mro__[-1] __init__.__globals__ __init_subclass__() __reduce_ex__(4)
__class__.__base__.__subclasses__()[104].load_module('os') __doc__.__class__ __dir__() __format__('>9999999999')
__class__.__class__('X',(),{}) func.__code__ _eval_subs free_symbols.pop().__class__ __sizeof__() gi_frame.f_back
"""
_SYMPY = """
Symbol('x') Function('f')(1) Lambda(x,x)(1) lambdify([],'1') sympify('1') S('1') Integer(42) Rational('1/0')
N(pi,10**8) Wild('x') Dummy() preview('x') latex(1) pycode(1) Matrix([[1]])**10**9 zeros(10**6) eye(10**9)
nsimplify(pi,[],10**-9) Eq(1,1) Piecewise((1,True)) Poly(x**10**8) factorint(10**80+1) nextprime(10**300)
isprime(2**9999-1) oo zoo nan solve(x**9-x,x) integrate(exp(-x**x),x) limit(x**x**x,x,oo) Product(x,(x,1,oo))
bernoulli(10**7) totient(10**90)
"""
_LATEX = r"""
\input{/etc/passwd} \include{x} \write18{touch_PLANTED} \immediate\write18{id} \openout5=PLANTED \def\x{\x\x}\x
\csname_x\endcsname \catcode`\%=0 \loop\iftrue\repeat \newcommand{\a}{\a\a}\a \directlua{os.execute('touch_PLANTED')}
\url{file:///etc/passwd} \href{x}{42} \frac{1}{0} \frac{0}{0} \infty-\infty \sum_{n=1}^{10^9}n \prod_{n=1}^{10^9}n
\int_0^\infty{e^{x^x}}dx \lim_{x\to0}\frac{\sin(x)}{x} \binom{10^9}{10^8} 10^{10^{10}} 9!!!!!! (10^6)! \sqrt[10^9]{2}
x_{1_{2_{3_{4}}}} \begin{matrix}1\end{matrix} \begin{pmatrix}1\\2\end{pmatrix}^{99999} \left(\left(\left( \right) }{
{} {{{ }}} \text{42} \mathrm{os.system} \operatorname{__import__}(1) \operatorname{eval}(x) \phantom{42}
42\color{white}{,43} %42 \nan \emptyset \varnothing \{\} \{1,2,3,4,5\} [0,1] (0,1) \mathbb{R} \mathbb{C} x=x 0=0 1=1
x\in\mathbb{R} \neg{x} x\ne0 (-\infty,\infty) x 42x 42=42 42=x 0\cdot{x} |x| \lvert{x}\rvert \pm42 \mp42 x=1\lor{x=2}
4\,2 4~2 \frac42 \frac4{2 \sqrt
"""
_FORMATS = r"""
{0.__class__} {0.__init__.__globals__} {0!r:>9999999999} {:9999999999d} {} {0} {__import__} %(x)s %*.*f %n%n%n
%999999999d $x ${x} $HOME `id` $(id) #{7*7} {{7*7}} {%print(1)%} <%=7*7%> [[${7*7}]] @{1} \N{DIGIT_FOUR} \x34\x32
\u0034 \064 &#52;
"""
_DOCUMENTS = """
!!python/object/apply:os.system ["true"]|!!python/name:os.system|!!python/module:os|!!binary NDI=|!!int "42"
&a [*a, *a]|{"py/object": "os.system"}|{"__reduce__": 1}|{"$ref": "#"}|{"a": {"$ref": "file:///etc/passwd"}}
{"score": 1}|[1, "", false]|{"tuple": [1, 2]}|{"tuple": 1}|{"tuple": {"tuple": [[]]}}|[{"tuple": []}]
{"value": 1.0, "error": "", "broken": false}|{"moves": []}|{"1": 1, "1": 2}|{"": ""}|{"0": null}|[null]|[true, false]
[[true]]|[1e999]|[-0.0]|[[NaN]]|["NaN"]|"42"|"\\u0034"
<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>|<![CDATA[42]]>|c__builtin__ eval (S'1' tR.|- a: *b
---|...
"""
_QUOTES = """
'|"|'''|\"\"\"|\\|\\'|\\"|'+'|"+"|')|")|']|"]|'}|"}|'],['|"],["|' or '1'='1|" or "1"="1|'; x='|\\n'|'#|"#|*/|-->|\\0'
'a' 'a'|b'a'|r'a'|u'a'|f'a'|f"{1}"|f"{x!r:{y}}"|rb'\\x'|'\\N{x}'|</answer>42|<answer>42|<answer></answer>
</think>42<think>|*|?|.*|(?i)|[^
"""
_NUMBERS = """
1e5000 -1e5000 1e-5000 1E+99999999999 1/3/5 1//0 1/1e-999 0x2A 0b101010 0o52 4_2 4__2 _42 42_ +42 ++42 --42 4e1e1 .e1
1e 1j 42j 1e309j nan+1j nanj infj inf-inf -nan sNaN NaN123 Infinity% 1/nan snan -sNaN 1e999999999999999999
0E-999999999 0e999999999 9E+425000000 00042 042 42.0.0 42,0 4,2 4'2 4\u202f2 42\u00a0 -\u221242 \u221242 \ufe6342
\uff0d42 42\ufe0f 42\u20e3 1\u204442 \u00bd \u2153 \u221e
"""
_ZEROS = "660 6F0 7C0 966 9E6 A66 BE6 E50 F20 1040 17E0 1810 FF10 1D7CE 1FBF0".split()  # digits of other scripts
_BRACKETS = (
    r'( )|[ ]|{ }|⟨ ⟩|（ ）|［ ］|< >|\{ \}|\left( \right)|f( )|[[ ]]|{"a": }|sqrt( )|\frac{1}{ }|x_{ }|\sqrt{ }'
)
_SIGNS = "- ~ ! not√ √ \\sqrt \\frac 2^ 2** x_ 1<< ¬ 1/ 1- x, 1;".split()


def _nested(pair, depth):
    begin, _, end = pair.partition(" ")
    return begin * depth + "1" + end * depth


def _wide(text):
    return "".join(chr(ord(c) + 0xFEE0) if c.isalnum() and c.isascii() else c for c in text)


def _bold(text):
    return "".join(chr(ord(c) + 0x1D41A - 97) if c.islower() and c.isascii() else c for c in text)


_POWERS = "**99999 ^99999 <<99999 !*99999 **9**9 ^9**9 <<9**9 !*9**9 **(-9**9) ^(-9**9) <<(-9**9) !*(-9**9)"
TEXTS = {
    "homoglyphs": [
        *map(_wide, _CALLS),
        *map(_bold, _CALLS),
        *(call.replace("o", "о").replace("e", "е") for call in _CALLS),
        *(call[0] + "\u200d" + call[1:] for call in _CALLS),
    ],
    "digits": [sign + chr(int(zero, 16) + 4) + chr(int(zero, 16) + 2) for zero in _ZEROS for sign in ("", "-")],
    "walks": [f"{root}.{walk}" for walk in _WALKS.split() for root in ("()", "''", "x")],
    "nesting": [_nested(pair, depth) for pair in [*_BRACKETS.split("|"), *_SIGNS] for depth in (90, 2000)],
    "numbers": [
        *_NUMBERS.split(),
        *("9" * n for n in (301, 4300, 4301, 30_000)),
        *("1" * n + "e-" + "9" * n for n in (3, 9, 30)),
    ],
    "powers": [f"{a}{op}" for a in ("9", "(9**9)", "x", "(x+y+1)") for op in _POWERS.split()],
    "quotes": [part for part in _QUOTES.strip().replace("\n", "|").split("|") if part],
    "latex": [text.replace("_PLANTED", f" {PLANTED}") for text in _LATEX.split()],
    "sympy": _SYMPY.split(),
    "formats": _FORMATS.split(),
    "documents": _DOCUMENTS.strip().replace("\n", "|").split("|"),
    "controls": ["42" + chr(code) + "43" for code in (*range(32), 127, 133, 8232, 8238, 65279, 55296, 57343, 1114111)],
}
ALL = list(dict.fromkeys(text for texts in TEXTS.values() for text in texts if text not in ANSWERS))
assert len(ALL) > 300

OTHERS = "coin_flip power_function decimal_arithmetic complex_arithmetic jugs graph_color game_of_life codeio".split()
OTHERS += "palindrome_partitioning tower_of_hanoi time_intervals calendar_arithmetic number_format dice".split()
LOGIC = "propositional_logic"
gym = needs("reasoning_gym", "tasks")

# ---- what they earn


@gym
def test_no_scorer_runs_believes_or_waits_for_any_of_hundreds_of_attacks():
    settings = {name: {} for name in (*rg.READERS, *OTHERS)}
    makers = Pool("tasks.rg:make_maker", (settings, {}), num=1, limit=60.0, quiet=True)
    scorers = Pool("tasks.rg:make_scorer", (settings, {}), num=1, limit=1.0, sealed=True)
    for name in settings:
        prompt, gold, entry = makers.ask([(name, None, 0)])[0].value
        wrong = ["", "wrong", "-17", "0", "1", "42", "10", "[]", "{}", "[0]", "[{}]", f"{gold}!"]
        honest = max(map(rg.earned, scorers.ask([(name, entry, text) for text in wrong])))
        texts = [text for text in (*ALL, prompt, prompt[::-1]) if text.lower() != str(gold).lower()]
        for text, answer in zip(texts, scorers.ask([(name, entry, text) for text in texts]), strict=True):
            assert rg.earned(answer) <= max(honest, 0.1), f"{name} gives {answer.value} to {text[:60]!r}"
    makers.close()
    scorers.close()
    assert not PLANTED.exists(), "an answer was run"


@gym
def test_of_contradicting_premises_a_conclusion_about_something_else_earns_nothing():
    make, score = (build({LOGIC: {}}, {}) for build in (rg.make_maker, rg.make_scorer))
    entry = make((LOGIC, None, 0))[2]
    assert [score((LOGIC, entry, text)) for text in ("¬1", "nonsense ∨ text", "x → y")] == [0, 0, 0]
    assert score((LOGIC, entry, "(Q ∨ P)")) == 1


def test_no_attack_is_a_right_answer_to_the_reader_of_formulas():
    pool = Pool("problems.verifiers:make_math_checker", (), num=1, limit=0.2, sealed=True)
    asked = [verifiers._same_formula(r"\{7,8\}", text) for text in ALL]
    pairs = [pair for pair in asked if isinstance(pair, tuple)]
    told = pool.ask(pairs)
    assert pool.ask([("f(1)+2", "2+f(1)")])[0].value is True, "a function of the formula's own is no attack"
    pool.close()
    assert len(pairs) > 200 and True not in asked and not PLANTED.exists()
    assert not [pair for pair, answer in zip(pairs, told, strict=True) if answer.value is True]


@pytest.mark.parametrize("family", TEXTS)
def test_a_completion_that_marks_an_attack_states_no_right_answer(family):
    for form in ("\\boxed{%s}", "#### %s", "<answer>%s</answer>", "The answer is %s."):
        said = [form.replace("%s", text) for text in TEXTS[family]]
        assert not any(verifiers.math_correct(completions=said, answer=["blue"] * len(said)))


# ---- code inside a worker

_CODE = """
write: open(P, 'w')|_io.FileIO(P, 'w')|os.open(P, 65)|os.mkdir(P)|os.mkfifo(P)|os.symlink('/', P)|os.mknod(P)|
os.truncate('/tmp', 0)|sqlite3.connect(P)|os.rename('/tmp', P)|os.chmod('/tmp', 0)|os.link('/bin/sh', P)|os.chdir('/')|
os.umask(0)|os.utime('/tmp')|LIBC.creat(P.encode(), 384)|LIBC.mkdir(P.encode(), 448)|LIBC.open(P.encode(), 65, 384)
read: open('/proc/%d/environ' % os.getppid()).read()|open('/proc/%d/mem' % os.getppid(), 'rb').read(9)|
open('/proc/self/fd/0').read()|dict(os.environ)|os.listdir('/proc')|os.stat('/')|os.readlink('/proc/self/exe')|
os.path.exists('/etc') or 1//0|os.getxattr('/', 'a')|os.scandir('/')|ctypes.string_at(id(1), 9)|
ctypes.CDLL('libc.so.6')|ctypes.pythonapi.PyRun_SimpleString(b'1')|os.memfd_create('x')
start: os.fork()|os.forkpty()|os.execv('/bin/touch', ['touch', P])|os.posix_spawn('/bin/touch', ['touch', P], {})|
os.system('touch ' + P)|os.popen('touch ' + P)|subprocess.Popen(['touch', P])|_thread.start_new_thread(open, (P, 'w'))|
os.spawnv(1, '/bin/touch', ['touch', P])|LIBC.fork()
talk: socket.socket()|socket.socketpair()|socket.create_connection(('127.0.0.1', 22))|
socket.getaddrinfo('localhost', 1)|socket.fromfd(0, 1, 1)|socket.create_server(('', 0))|socket.gethostname()|
socket.sethostname('x')|os.pipe()|os.openpty()|os.eventfd(0)|os.dup(channel())
kill: os.kill(os.getppid(), 9)|os.killpg(os.getpgid(0), 9)|os.kill(-1, 9)|signal.raise_signal(9)|
signal.pthread_kill(1, 9)|LIBC.kill(-1, 9)|os.setpriority(0, os.getppid(), 19)|os.sched_setaffinity(os.getppid(), {0})|
os.abort()|os._exit(0)|sys.exit(0)|ctypes.memset(id(None), 0, 64)
speak: [os.write(n, b'x' * 99) for n in range(channel() + 1)]|os.write(channel(), frame(0, 1.0, '', False))|
os.write(channel(), frame(-1, 1.0, '', False) * 9)|os.write(channel(), frame(True, 1, '', False))|
os.write(channel(), frame(None, 1.0, '', True))|os.write(channel(), frame('1', 1.0, '', False))|
os.write(channel(), frame([], {}, '', 0))|os.write(channel(), frame(1e308, 1.0, '', False))|
os.write(channel(), b'\\x00')|os.write(channel(), b'\\x00\\x00\\xff\\xff')|os.close(channel())|
os.write(channel(), b'\\xff' * 65536)|os.write(channel(), b'\\x00' * 99999)|[os.close(n) for n in range(3, 99)]|9|
os.write(channel(), frame(0) * 2000)|os.read(channel(), 99)|float('nan')|10**4000|10**5000|{'a': 10**308}|'\\ud800'|
b''|object()|{1: 2}|-1|replay(0)|replay(1)|[replay(0), later(0.05)]|'9' * 2**16|[[[]]] * 9999|'\\x1b[2J'|
(_ for _ in ()).throw(KeyboardInterrupt('\\x1b'))
linger: later(0.05)|later(0.0001)|signal.signal(14, signal.SIG_IGN)|signal.setitimer(0, 1e-4, 1e-4)|
signal.setitimer(2, 1e-3, 1e-3)|signal.alarm(1)|signal.signal(27, signal.SIG_IGN)|signal.signal(15, signal.SIG_IGN)|
sys.setrecursionlimit(60)|sys.set_int_max_str_digits(640)|sys.setswitchinterval(1e9)|setattr(os, 'write', None)|
setattr(sys, 'stdout', 1)|KEEP.append(bytearray(9 * 10**8))
waste: [0 for _ in iter(int, 1)]|sum(range(10**12))|9**9**9|time.sleep(99)|bytearray(2**40)|' ' * 2**40|[[0] * 10**9]|
(signal.signal(27, signal.SIG_IGN), sum(range(10**12)))
"""
INSIDE = {  # by family: a line that ends with a bar goes on in the next
    line.partition(": ")[0]: line.partition(": ")[2].split("|")
    for line in _CODE.strip().replace("|\n", "|").splitlines()
}


@pytest.fixture(scope="module")
def inside():
    """Asks a worker to run a code that is known to it from before its seal, and the double of 3 thereafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"))
        patch.setenv("JUDGE_API_KEY", KEY)
        sources = {code: code for codes in INSIDE.values() for code in codes}
        pool = Pool("attacks:answerer", ("", sources, str(PLANTED)), num=1, limit=0.4, sealed=True)
        yield lambda *deeds: pool.ask([*deeds, ("double", 3)])
        pool.close()


@on_linux
@pytest.mark.parametrize("family", INSIDE)
def test_code_inside_a_worker_reaches_nothing_and_costs_the_next_answer_nothing(inside, family):
    codes, before, begin = INSIDE[family], (dict(os.environ), threading.active_count()), time.monotonic()
    stays = family in ("speak", "linger")  # the others end their worker, or fail
    told = [inside((code,)) for code in codes] if stays else [[answer] for answer in inside(*((c,) for c in codes))]
    assert stays or told.pop() == [(6, "", False)]
    for code, (answer, *after) in zip(codes, told, strict=True):
        assert after == [(6, "", False)] * stays and KEY not in repr(answer), code
        assert stays or answer.error or answer.value == -1 or code == "dict(os.environ)", f"{code} gave {answer}"
    assert not PLANTED.exists() and (dict(os.environ), threading.active_count()) == before
    assert time.monotonic() - begin < 15 * len(codes)


@on_linux
def test_every_system_call_by_its_number_is_refused_but_those_of_the_table(inside):
    column = seal._MACHINES[os.uname().machine][0]
    allowed = {int(call.split()[column]) for call in seal._CALLS.split(",")}
    numbers = [number for number in range(470) if number not in allowed]
    numbers += [number + 2**30 for number in allowed]  # the same by x32, another table of the same kernel
    told = inside(*(("syscall", number) for number in numbers))[:-1]  # of uretprobe, beyond filters, a worker dies
    assert all(answer.value == -1 or "status -4" in answer.error for answer in told)
