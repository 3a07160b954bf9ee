"""
Measures how much CPU time a run gets, and describes a shortage.

On a busy machine, or in a container with little CPU time, a run takes several times as long as it
should. Only phases that compute on the CPU are measured. A low CPU time in other phases is no
shortage, because a reward function, a tool or a judge may wait for another program, and a GPU
computes without the CPU.
"""

import resource

from machine import gpu

COMPUTING_PHASES = ("ref", "teacher", "update")  # these phases wait for no other program
FEW_CORES = 0.5  # a process that gets fewer CPU cores than this has a shortage
# A shorter measurement may be dominated by reading files, or by a short burst of other work.
MIN_SECONDS = 5.0


def count_cpu_seconds() -> float:
    """
    The CPU time of this process and of its child processes that have ended, in seconds.

    The child processes count because MLX starts a compiler.
    """
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


class CpuShare:
    """Sums the elapsed seconds and the CPU seconds of the phases that compute on the CPU."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.cpu_s = 0.0

    def add_if_cpu_phase(self, name: str, elapsed_s: float, cpu_s: float) -> None:
        """
        Adds the seconds of a phase if the phase computes on the CPU.

        `elapsed_s` is the duration of the phase, and `cpu_s` is the CPU time that it used.
        """
        if name in COMPUTING_PHASES and not gpu.on_gpu():
            self.elapsed_s += elapsed_s
            self.cpu_s += cpu_s

    def describe_shortage(self, wait_s: float = 0.0) -> str:
        """
        A sentence about the shortage, or "" if the process gets at least half of a CPU core.

        wait_s: how many seconds of the measured phases the process spent waiting for other ranks.
        """
        elapsed_s = self.elapsed_s - wait_s
        if elapsed_s < MIN_SECONDS or self.cpu_s >= FEW_CORES * elapsed_s:
            return ""
        return (
            f"this process gets {self.cpu_s / elapsed_s:.2f} of a CPU core while it trains, so the "
            "run takes at least twice as long as on an idle machine; end other programs, or give "
            "the container or virtual machine more CPU time"
        )
