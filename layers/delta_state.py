"""
What a gated delta net keeps of past tokens, where a layer with attention has keys and values; see kv_cache.py.

Axes: N rows or slots, W columns of the convolution, H value heads.
"""

from collections.abc import Sequence

import mlx.core as mx

import kv_cache

Held = tuple[mx.array, mx.array]


class DeltaState:
    """
    What a gated delta net keeps: of a batch of rows, of slots, or of the rows of a tree's newest level.

    inputs: the last ones of its convolution, (N, W - 1, channels); memory: (N, H, value dim, key dim) float32. None
    before the first tokens. Arrays are replaced, never written, so gradients go through them.
    """

    def __init__(self, inputs: mx.array | None = None, memory: mx.array | None = None):
        self.inputs, self.memory = inputs, memory

    @property
    def held(self) -> Held | None:
        return None if self.inputs is None or self.memory is None else (self.inputs, self.memory)

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        self.inputs, self.memory = inputs, memory

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.inputs, self.memory) if array is not None]

    def newest(self) -> list[Held]:
        """What a forward pass has left, for `checkpointed`."""
        return [] if self.held is None else [self.held]

    def add(self, newest: list[Held]) -> None:
        self.update(*newest[0])

    def taken(self, rows: Sequence[int]) -> "DeltaState":
        """The state of each of these rows."""
        index = mx.array(list(rows))
        return DeltaState(*(array[index] for array in self.arrays()))

    def child(self, rows_of: Sequence[slice | mx.array], parents: Sequence[int]) -> "DeltaState":
        """What the rows of a tree's next level begin with: the states of their parents."""
        return self.taken(parents)

    def flatten(self, target: "DeltaState", index: mx.array) -> None:
        """The state of a tree's newest level is that of its rows."""
        target.update(*self.arrays())

    def slots(self, num_slots: int, width: int, share: bool) -> "DeltaSlots":
        return DeltaSlots(self, num_slots)


class DeltaSlots(DeltaState):
    """A gated delta net's state of each slot, which begins with a copy of its prompt's."""

    def __init__(self, prompts: DeltaState, num_slots: int):
        self.prompts = prompts
        super().__init__(*prompts.taken([0] * num_slots).arrays())

    def assign(self, prompt_of: list[int], begun: list[int], moved: list[int]) -> None:
        """Gives the slots in `begun` their prompt's state, also where the prompt was the slot's before."""
        if begun:
            inputs, memory = self.prompts.taken([prompt_of[slot] for slot in begun]).arrays()
            self.put(mx.array(begun), (inputs, memory))

    def put(self, slots: mx.array, state: Held) -> None:
        """Makes this the state of some slots."""
        for buffer, held in zip(self.arrays(), state, strict=True):
            buffer[slots] = held

    def keep(self, slots: mx.array) -> None:
        self.inputs, self.memory = (array[slots] for array in self.arrays())


class DeltaTurns(DeltaSlots):
    """
    The state of slots whose rows take turns, and the one before the newest token: a slot draws one token more before
    the end of its turn is read. Who goes on puts the state of the end back.
    """

    aimed: mx.array | None = None  # the slots that the next tokens are of; None: all, one each
    before: list[mx.array]

    @property
    def held(self) -> Held | None:
        inputs, memory = self.arrays()
        return (inputs, memory) if self.aimed is None else (inputs[self.aimed], memory[self.aimed])

    def update(self, inputs: mx.array, memory: mx.array) -> None:
        if self.aimed is not None:
            return self.put(self.aimed, (inputs, memory))
        self.before = self.arrays()
        self.inputs, self.memory = inputs, memory

    def take(self, slot: int, num_extra: int) -> Held:
        """The state of a slot without its newest `num_extra` tokens, 0 or 1."""
        inputs, memory = self.before if num_extra else self.arrays()
        return inputs[slot : slot + 1], memory[slot : slot + 1]


kv_cache.STATES["linear_attention"] = DeltaState
