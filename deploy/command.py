"""
`uv run lora.py --fuse --run runs/NAME --out DIR` merges an adapter into its model for good, `--export gguf` too, in one
file for llama.cpp, and `--export peft` writes the adapter for others.

Other programs render a chat by the model's template alone. A fused model's template therefore says what training's
settings said: no thinking, the task's system prompt. More messages that all prompts begin with are what who talks to it
sends: Ollama by its Modelfile, others by the card. Left out: what an adapter is (lora.py, disk/adapters.py).
"""

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

import gwen
import tasks
from config import Config
from deploy import few_bits, gguf_writer, ollama
from disk import adapters, gguf, hub, run_files
from flags import LEAST_FREE, Parser, line_of, names_path, refuse_full_disk, report_mistakes
from machine import alive, memory
from machine.output import guard_output
from problems import chat_template
from settings.checks import check_settings
from settings.sources import load_recipe


class TrainedRun(NamedTuple):
    """A run's settings, and what all its prompts begin with."""

    config: Config
    system: str | None
    shots: list[dict[str, Any]]  # messages after it
    said: str  # where they are not known


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("lora.py", "Merge an adapter into its model, or write it in another layout.")
    parser.add_argument(
        "--fuse", action="store_true", help="write the merged model, a Hugging Face directory"
    )
    parser.add_argument(
        "--export",
        choices=["peft", "gguf"],
        help="the adapter alone for PEFT, or merged in one file",
    )
    parser.add_argument(
        "--bits", type=int, choices=gguf_writer.LABELS, help="of --fuse and gguf (default: 16)"
    )
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--model", help="demo, a Hugging Face directory or a hub id (default: the adapter's)"
    )
    parser.add_argument(
        "--keep-template", action="store_true", help="leave the chat template as the base has it"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new directory")
    args = parser.parse_args(argv)
    if args.fuse == (args.export is not None):
        raise ValueError("give --fuse for a whole model, or --export peft for the adapter alone")
    if args.bits and args.export == "peft":
        raise ValueError(f"--bits {args.bits} is of --fuse and --export gguf; leave it out")
    refuse_taken(args.out)
    adapter = run_files.adapter_from_flags(args, model=None)
    if not adapter:
        raise ValueError("there is no adapter yet; name one with --adapter, or a run with --run")
    name, few = args.model, args.bits in (4, 8)
    place = Path(args.run or adapter).resolve()  # an adapter lies in its run, or is named by it
    of_run = next(
        (str(one) for one in (place, *place.parents[:3]) if (one / "config.yaml").is_file()), None
    )
    config = check_settings(load_recipe(run_files.config_file(of_run))) if of_run else None
    least = least_bytes(name, adapter, args.export, args.bits or 16)
    with scratch_for(args.out, least) as begun:
        wide, made = begun / "wide", begun / "made"
        with names_output(args.out), alive.show_activity(f"writing {args.out}"):
            opening, said = shared_opening(config) if config else ([], "")
            shots = opening[bool(opening) and opening[0]["role"] == "system" :]
            system = opening[0]["content"] if len(shots) < len(opening) else None
            trained = (
                TrainedRun(config, system, shots, said)
                if config and not args.keep_template
                else None
            )
            end_tokens = config.sampling.end_tokens if config else []
            if args.fuse or (few and of_run):  # beside what has few bits is measured
                what = fuse(name, adapter, wide if few else made, trained, end_tokens)
            if args.fuse and few:
                what += (
                    f"; in {few_bits.quantize_directory(wide, made, args.bits):.3g} bits a weight"
                )
            elif args.export == "gguf":
                title, bits = args.out.resolve().name, args.bits or 16
                what = export_gguf(name, adapter, made, trained, title, bits, end_tokens)
            elif args.export:
                what = export_peft(name, adapter, made)
        if shots:
            what += f"; training's prompts begin with {len(shots)} messages more, which who talks to it must send"
        if args.run:
            what += ": README.md has them" * bool(shots)
            card = run_files.make_model_card(
                args.run, args.step, args.export or "mlx", opening * bool(shots)
            )
            with names_output(args.out):
                (made / "README.md").write_text(card, encoding="utf-8")
        with names_output(args.out):
            put_into_place(made, args.out)
        print(f"{args.out}: {what}")
        out, its = (shlex.quote(text) for text in (str(args.out), args.out.resolve().name))
        if args.export != "peft":
            folder, what = f"~/.lmstudio/models/me/{its}", "*.gguf" if args.export else "*"
            if args.export:
                print(f"for Ollama: ollama create {its} -f {out}/Modelfile && ollama run {its}")
            print(
                f"for LM Studio{'' if args.export else ' on a Mac'}: mkdir -p {folder} && cp {out}/{what} {folder}/"
            )
        if "give them the whole model" not in what:
            print(f"to publish it: uv run hf upload OWNER/{its} {out}", flush=True)
        if few:
            few_bits.print_quantization_cost(
                of_run, wide, next(args.out.glob("*.gguf"), args.out), args.bits
            )


# ---- where it is written


def refuse_taken(out: Path) -> None:
    """Raises ValueError unless `out` is a new path, an empty directory, or a link to one of these."""
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise ValueError(f"--out {out} cannot be read: {line_of(error)}") from error
    if is_taken:
        raise ValueError(f"--out {out} exists; give a new directory")


def least_bytes(name: str | None, adapter: str, export: str | None, bits: int) -> int:
    """A lower bound of what is written: the weights have 16 bits or 32, and `--fuse --bits` writes them whole first."""
    if export == "peft":
        return sum(
            file.stat().st_size for file in adapters.find_adapter(adapter).glob("*.safetensors")
        )
    base = hub.find_model(gwen.choose_model(name, adapter)[0])
    weights = (base / gguf.LINK).resolve() if (base / gguf.LINK).is_file() else None
    files = [weights] if weights else base.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    return size * bits // 32 if export or weights else size


@contextlib.contextmanager
def scratch_for(out: Path, num_bytes: int) -> Iterator[Path]:
    """
    A directory on the disk of `out`, removed at the end. Other libraries have their temporary files there too.

    num_bytes: what will be written at least. Raises ValueError, before the work, where that is not possible.
    """
    target = out.resolve()
    parent = target if target.is_dir() else target.parent
    before = tempfile.tempdir
    try:
        parent.mkdir(parents=True, exist_ok=True)
        refuse_full_disk("--out", out, parent, num_bytes + LEAST_FREE)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {line_of(error)}") from error
    with scratch as place:
        tempfile.tempdir = place
        try:
            yield Path(place)
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def names_output(out: Path) -> Iterator[None]:
    """Inside, what the system or MLX says of a file that cannot be written names --out."""
    try:
        with names_path(out):
            yield
    except (OSError, RuntimeError) as error:
        is_elsewhere = (
            isinstance(error, OSError) and error.filename and not is_in(error.filename, out)
        )
        if is_elsewhere or memory.should_try_smaller(error):
            raise
        if isinstance(error, OSError) and error.errno:
            reason = line_of(error)
        else:  # "[write] Unable to write 1168 bytes to file"
            free = shutil.disk_usage(out.resolve().parent).free
            reason = f"{hub.first_line(error)} ({free / 1e6:.3g} MB are free there)"
        raise OSError(f"--out {out} cannot be written: {reason}") from error


def is_in(path: str | Path, out: Path) -> bool:
    """Whether a path lies in `out`, or beside it in the scratch directory that becomes it."""
    target, place = out.resolve(), Path(path).resolve()
    if not place.is_relative_to(target.parent):
        return False
    first = place.relative_to(target.parent).parts[:1]
    return bool(first) and (first[0] == target.name or first[0].startswith(f".{target.name}-"))


def put_into_place(made: Path, out: Path) -> None:
    """Moves a new directory to `out`. One that exists keeps its place: it may be a link, a mount or the current one."""
    if not out.exists():
        os.replace(made, out.resolve())
        return
    for part in sorted(made.iterdir()):
        os.replace(part, out / part.name)


# ---- what is written


def fuse(
    name: str | None,
    adapter: str,
    out: Path,
    trained: TrainedRun | None,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model in the type of its base.

    trained: a run, whose prompts its template shall render. end_tokens: what ended completions there besides.
    """
    name, _ = gwen.choose_model(name, adapter)
    dtype = (
        gwen.default_dtype() if "GWEN_DTYPE" in os.environ else stored_dtype(hub.find_model(name))
    )
    model, tokenizer = gwen.load(name, dtype, adapter=adapter, end_tokens=end_tokens)
    note = adapt_template(tokenizer, trained) if trained else ""
    gwen.save(model, out, tokenizer)
    return f"{name} with {adapter} merged in, {dtype}{note}"


def stored_dtype(directory: Path) -> mx.Dtype:
    """The type of a checkpoint's largest tensor of floating point; of packed weights these are the scales."""
    if (link := directory / gguf.LINK).is_file():
        largest = max(gguf.open_file(link.resolve()).tensors, key=lambda tensor: tensor.n_elements)
        return gguf.WIDE.get(largest.tensor_type.name, mx.float16)
    floating = [
        one for one in hub.load_weights(directory).values() if mx.issubdtype(one.dtype, mx.floating)
    ]
    return max(floating, key=lambda tensor: tensor.nbytes).dtype


def adapt_template(tokenizer: Any, trained: TrainedRun) -> str:
    """Makes a tokenizer's template that of a run's prompts, and says what was written into it."""
    written = chat_template.fix_template(
        tokenizer, trained.system, trained.config.sampling.thinking
    )
    how = f"; its chat template has {written}, as in training (--keep-template leaves the base's)"
    return trained.said + (how if written else "")


def shared_opening(config: Config) -> tuple[list[dict[str, Any]], str]:
    """The messages that all prompts of a run begin with, and what is to be said where they are not known."""
    try:
        train, held_out = tasks.load_train_and_held_out(config)
    except ValueError as error:  # the data were moved
        return [], f"; the system prompt of training is unknown: {error}"
    opening, num_systems = chat_template.shared_opening(train or held_out)
    said = (
        f"; training had {num_systems} system prompts, and the template has none"
        if num_systems > 1
        else ""
    )
    return opening, said


def export_peft(name: str | None, adapter: str, out: Path) -> str:
    """Writes the adapter alone, with a base that other programs can open where there is one."""
    read = adapters.read_adapter(adapter)
    base, note = name or read.base, ""
    if base:
        gwen.warn_of_other_base(adapter, base)
    if base and hub.is_gguf(base):
        note = (
            f"; other programs do not open {base} as its base: give them the whole model, by --fuse"
        )
    base = str(hub.BUNDLED[base]) if base in hub.BUNDLED else base
    adapters.write_peft(read._replace(base=base), out)
    return f"{adapter} for {base}, in the layout of peft{note}"


def export_gguf(
    name: str | None,
    adapter: str,
    out: Path,
    trained: TrainedRun | None,
    title: str,
    bits: int,
    end_tokens: Sequence[str] = (),
) -> str:
    """Writes the merged model as a GGUF file of that title, with a Modelfile; trained, end_tokens: as of `fuse`."""
    name, _ = gwen.choose_model(name, adapter)
    gwen.warn_of_other_base(adapter, name)
    directory = hub.find_model(name)
    model, tokenizer = (
        gwen.load_model(directory, mx.float32, adapter, lazy=True),
        hub.load_tokenizer(directory),
    )
    config = gwen.with_ends(model.config, tokenizer, name, end_tokens)
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    del model  # so that the writer, which reads a matrix at a time, holds no more
    note = adapt_template(tokenizer, trained) if trained else ""
    what = gguf_writer.write_gguf(out, title, weights, config, tokenizer, bits)
    its = (trained.config, trained.shots) if trained else (None, [])
    what += f", and a Modelfile{ollama.write_modelfile(out, tokenizer, config.end_ids, *its)}"
    return f"{what}; {name} with {adapter} merged in{note}"
