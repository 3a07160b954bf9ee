"""
The instructions of a kernel's loops, as LLVM writes them for a GPU with simdgroups of 32: NVIDIA's PTX.

Nobody's Metal compiler can be asked here, but what it must fold, unroll and keep in registers is the same. PTX has one
instruction for a load, a fused multiply-add, a shuffle and a power of two. A simdgroup's sum is five shuffles and five
additions, and e**x counts as a product and a power of two, though Metal's is longer where fast mathematics is off.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx

from machine import gpu
from metal import emulator, toolchain
from metal.program import Program, export

PRELUDE = """
#define kernel
#define thread
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(4)))
#define threadgroup __attribute__((address_space(3)))
#define INFINITY __builtin_inff()
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long size_t;
typedef long int64_t;
typedef int int32_t;
typedef float float4 __attribute__((ext_vector_type(4)));
typedef _Float16 half;
typedef _Float16 float16_t;
typedef __bf16 bfloat16_t;
struct uint3 { uint x, y, z; };
enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(~0u); }
inline float simd_broadcast(float x, uint lane) { return __nvvm_shfl_sync_idx_f32(~0u, x, lane, 31); }
inline float simd_shuffle_xor(float x, uint step) { return __nvvm_shfl_sync_bfly_f32(~0u, x, step, 31); }
inline float simd_sum(float x) {
    #pragma unroll
    for (int step = 16; step > 0; step /= 2) x += simd_shuffle_xor(x, step);
    return x;
}
namespace metal {
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline int min(int x, int y) { return x < y ? x : y; }
inline float rsqrt(float x) { return __nvvm_rsqrt_approx_f(x); }
namespace fast { inline float exp2(float x) { return __nvvm_ex2_approx_f(x); } }
inline float exp(float x) { return fast::exp2(x * 1.4426950408889634f); }
}
"""
FLAGS = "-x c++ -std=c++17 -target nvptx64-nvidia-cuda -nostdinc -fno-exceptions -fno-rtti -O3 -ffp-contract=fast -S"
FLAGS += " -Xclang -target-cpu -Xclang sm_80 -Xclang -target-feature -Xclang +ptx80 -Wno-everything -o - -"


class Loop(NamedTuple):
    """A loop without those inside of it."""

    is_innermost: bool
    num_blocks: int  # runs of instructions without a jump in or out
    instructions: Counter[str]  # by name; of all its blocks, as if each were taken


def of_call(kernel: gpu.Kernel, call: Callable[[], Any]) -> list[Loop]:
    """The loops of `kernel` with the constants and types of its first launch in a call, an outer one first."""
    programs: list[Program] = []

    def maker(name: str, inputs: list[str], outputs: list[str], source: str, header: str, contiguous: bool) -> Any:
        made = emulator.make_metal_kernel(name, inputs, outputs, source, header, contiguous)

        def launch(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            programs.append(export(made, header, source, inputs, options))
            return [mx.zeros(s, t) for s, t in zip(options["output_shapes"], options["output_dtypes"], strict=True)]

        return launch

    def make(self: gpu.Kernel) -> Any:
        header, body = self.text
        return maker(f"gwen_{self.name}", self.inputs, self.outputs, body, header, self.contiguous)

    with mock.patch.object(gpu.Kernel, "make", make):
        call()
    program = next(program for program in programs if f"gwen_{kernel.name}_" in program.name)
    return loops(ptx(program))


def ptx(program: Program) -> str:
    """The kernel, compiled."""
    body = re.sub(r"^( *)threadgroup (?=\w+ \w+\[)", r"\1static threadgroup ", program.body, flags=re.M)
    signature = re.sub(r"\[\[.*?\]\]", "", program.signature)
    text = f"{PRELUDE}{program.header}{signature}{body}}}\n"
    if program.instance != program.name:
        text += f"template decltype({program.instance}) {program.instance};\n"
    done = toolchain.run([*toolchain.require().compile[:2], *FLAGS.split()], text)
    assert not done.returncode, done.stderr
    return done.stdout


BLOCK = re.compile(r"^(?:// %bb\.|\$L__BB\d+_)(\d+):(.*)")


def loops(text: str) -> list[Loop]:
    """All loops; LLVM's comments say which blocks belong to which."""
    blocks: dict[str, list[str]] = {}  # instructions by the block's number
    loop_of: dict[str, str] = {}  # of each block within a loop, the number of the innermost one's first block
    inner: dict[str, bool] = {}  # whether a loop is innermost, by the number of its first block
    number = ""
    for line in text.splitlines():
        if found := BLOCK.match(line):
            number = found[1]
            blocks[number] = []
        if "Loop Header: Depth" in line:
            inner[number] = "Inner Loop Header" in line
            loop_of[number] = number
        if found := re.search(r"in Loop: Header=BB\d+_(\d+)", line):
            loop_of[number] = found[1]
        instruction = line.partition("//")[0].strip()
        if number and instruction and not instruction.startswith((".", "$", "}")):
            blocks[number].append(instruction)
    members = {head: [block for block in blocks if loop_of.get(block) == head] for head in inner}
    return [
        Loop(inner[head], len(own), Counter(name(i) for block in own for i in blocks[block]))
        for head, own in members.items()
    ]


def name(instruction: str) -> str:
    words = instruction.rstrip(";").split()
    return words[1] if words[0].startswith("@") else words[0]
