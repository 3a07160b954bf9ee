"""
A merged model in 8 or 4 bits, and the cost of the lost bits.

mlx_lm packs the weights. The cost is measured for a packed directory or a GGUF file. It consists of
the held-out figures, and of the distance by which rounding moves the model, as a fraction of the
distance by which training moved it. Both distances are divergences on the model's own answers. The
number of changed weights says nothing: most of them change, and their noise adds up to little.

This file does not cover calibration with data, for which mlx_lm has commands.
"""

import contextlib
import shutil
import sys
from pathlib import Path

from mlx.utils import tree_flatten

import gwen
import judge
import tasks
from config import Config
from disk import eval_record, hub, model_card, run_files
from evaluation import evaluate, measures, policy
from machine import alive
from prompts.examples import Example
from step.batch import completion_hidden_states, make_batches
from step.sample import Sample
from text.printable import escape_invisible
from tools import toolbox as toolbox_module

TOO_MUCH = 1 / 3  # of training's distance; a warning appears if rounding moves the model further
POSITIONS = 256  # positions in a pass that holds all its logits


def quantize_directory(wide: Path, out: Path, bits: int) -> float:
    """
    Writes a packed copy of a model's directory, as `mlx_lm.convert -q` does.

    Returns the mean number of bits per weight. Raises ValueError if no weight can be packed.
    """
    from mlx_lm.utils import (
        compute_bits_per_weight,
        load_model,
        quantize_model,
        save_config,
        save_model,
    )

    model, config = load_model(wide, lazy=True)
    with contextlib.redirect_stdout(sys.stderr):
        model, config = quantize_model(model, config, None, bits)
    names = [name for name, _ in tree_flatten(model.parameters())]
    if not any(name.endswith(".scales") for name in names):
        raise ValueError(
            f"--bits {bits}: mlx_lm packs 64 columns at a time, "
            "and no width of this model is a multiple"
        )
    bits_per_weight: float = compute_bits_per_weight(model)
    save_model(out, model, donate_model=True)
    save_config(config, out / "config.json")
    weights_and_config = shutil.ignore_patterns("model*", "config.json")
    shutil.copytree(wide, out, ignore=weights_and_config, dirs_exist_ok=True)
    return bits_per_weight


def print_quantization_cost(run: str | None, wide: Path, few: Path, bits: int) -> None:
    """
    Compares a run's model in few bits and in 16 on held-out problems, and prints the result.

    wide: the model's directory in 16 bits. few: its directory or GGUF file in few bits.
    """
    try:
        config = load_config_with_problems(run)
        hub.find_model(few)  # refuses at once a file that Gwen writes but cannot read
        assert run is not None
        task = tasks.make_task(config, held_out_keys=tasks.read_held_out(run))
        print(f"now what {bits} bits cost, by held-out problems; what is written stays", flush=True)
        _, sampled, greedy = evaluate_model(config, task, wide, 16)
        model, _, _ = evaluate_model(config, task, few, bits)
        lost = measures.measure_divergence(model, sampled, 1.0)  # nats per token
        agreement = greedy_agreement(model, greedy)
        del model  # one model at a time
        base, _ = gwen.load(
            config.model.name,
            adapter=run_files.adapter_path(run, 0),
            end_tokens=config.sampling.end_tokens,
        )
        learned = measures.measure_divergence(base, sampled, 1.0)
    except ValueError as error:  # the model has been written all the same
        print(escape_invisible(f"what {bits} bits cost was not measured: {error}"))
        return

    fraction = lost / max(learned, 1e-9)
    beginning = model_card.describe_start(config.to_flags())
    print(
        f"{bits} bits are {lost:.2g} nats a token from 16, {fraction:.2%} of the {learned:.2g} "
        f"that training moved{beginning}; {agreement:.1%} of the tokens of greedy answers "
        "stay the likeliest"
    )
    if lost > TOO_MUCH * learned:
        print(
            f"WARNING: rounding to {bits} bits changed the model by over a third as much as "
            "training did; use more bits, or train longer"
        )


def load_config_with_problems(run: str | None) -> Config:
    """A run's settings. Raises ValueError if there is no run, or its task has no problems."""
    reason = "only --run of a task with problems tells them"
    if run is None:
        raise ValueError(reason)
    config = policy.load_run_config(run, {})
    if config.data.task == "own" and not config.data.path:  # given replies are not problems
        raise ValueError(reason)
    return config


def evaluate_model(
    config: Config, task: tasks.Task, place: Path, bits: int
) -> tuple[gwen.Model, list[Sample], list[Sample]]:
    """
    Evaluates the model at a path as its run does, and prints the result.

    Returns the model, its sampled answers and its greedy answers.
    """
    model, tokenizer = gwen.load(place, end_tokens=config.sampling.end_tokens)
    # A judge on a server may cost money, so it is not used here.
    needs_judge = task.rubric is not None and task.verifier is None and not config.judge.url
    rubric = task.rubric if needs_judge else None
    grader, _ = judge.make_graders(config, rubric, None)
    answers: list[list[Sample]] = []

    def answer(
        problems: list[Example], params: evaluate.EvalParams
    ) -> tuple[list[Sample], list[Sample]]:
        sampled, greedy = evaluate.answer_both(model, tokenizer, problems, params)
        answers.extend((sampled, greedy))
        return sampled, greedy

    toolbox = toolbox_module.make_toolbox(
        config, task.tools, task.environments, tokenizer, model.config
    )
    params = evaluate.EvalParams.from_config(config, toolbox=toolbox)
    record, _ = evaluate.evaluate_task(answer, task, params, grader=grader)
    print(f"{bits} bits: {eval_record.evaluation_line(record)}", flush=True)
    sampled, greedy = answers
    return model, sampled, greedy


def greedy_agreement(model: gwen.Model, greedy: list[Sample]) -> float:
    """The fraction of the tokens in greedy answers that are also the likeliest for `model`."""
    num_equal = 0.0
    num_tokens = 0.0
    batches = make_batches(greedy, POSITIONS, "off")
    for batch in alive.Bar(batches, desc="likeliest tokens", unit="part"):
        logits = completion_hidden_states(model, batch) @ model.head_weight.T
        is_equal = (logits.argmax(-1) == batch.completion_ids) * batch.mask
        num_equal += is_equal.sum().item()
        num_tokens += batch.mask.sum().item()
    return num_equal / num_tokens
