"""
A model that is read from disk layer by layer, where a machine cannot hold it beside the one in training.

All batches of a step go through a layer before the next one is read. So the weights of one layer are held at a
time, and beside them two arrays for each position of the step; a step reads the model once. Left out: what is made of
the hidden states (teacher.py), when to do this (preflight.py).

Axes: M rows of a batch, T own tokens, D hidden.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

import gwen
from step.batch import Batch, hidden

Streams = list[tuple[mx.array, mx.array]]  # the two results of a layer, of each pass through it


class Recorded(nn.Module):
    """A layer that keeps its results, uncomputed."""

    def __init__(self, layer: gwen.Block, results: Streams):
        super().__init__()
        self.layer = layer
        self._results = results

    def __call__(self, x: mx.array, delta: mx.array | None, context: gwen.Context) -> tuple[mx.array, mx.array]:
        self._results.append(self.layer(x, delta, context))
        return self._results[-1]


def hidden_states(model: gwen.Model, batches: list[Batch]) -> list[mx.array]:
    """
    `batch.hidden` of each batch, (M, T, D), to the bit. What it leaves of the model is all but its layers.

    model: as `gwen.open_model` gives it. The passes are written down whole, which computes nothing, and then computed
    across: an array that exists forgets what it came from, so a layer that every pass has left is free.
    """
    streams: list[Streams] = [[] for _ in model.layers]
    layers: list[Any] = [Recorded(layer, results) for layer, results in zip(model.layers, streams, strict=True)]
    model.layers = layers
    found = [hidden(model, batch) for batch in batches]
    for results in streams:
        for pair in results:
            mx.eval(pair)  # wait: the next batch may use this one's memory
        model.layers.pop(0)
        results.clear()
    return found
