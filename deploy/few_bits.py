"""
A fused model in 8 or 4 bits, packed by mlx_lm, and what these cost, there or in a GGUF file: of held-out figures, and
of what was learned.

The latter is what rounding moves by what training moved, both as divergences on the model's own answers. Counting
changed weights says nothing: most of them change, and their noise adds up to little. Left out: calibration by data,
which mlx_lm's own commands have.
"""

import contextlib
import shutil
import sys
from pathlib import Path

from mlx.utils import tree_flatten

import evaluate
import gwen
import judge
import tasks
from config import Config
from disk import hub, run_files
from flags import escape_invisible
from machine import alive
from problems import episodes
from problems.examples import Example
from step.batch import completion_hidden_states, make_batches
from step.sample import Sample

TOO_MUCH = 1 / 3  # of what training moved
POSITIONS = 256  # of a pass that holds all its logits


def quantize_directory(wide: Path, out: Path, bits: int) -> float:
    """Writes a model's directory anew, as `mlx_lm.convert -q`; returns bits a weight. ValueError if none is packed."""
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
    if not any(name.endswith(".scales") for name, _ in tree_flatten(model.parameters())):
        raise ValueError(
            f"--bits {bits}: mlx_lm packs 64 columns at a time, and no width of this model is a multiple"
        )
    size: float = compute_bits_per_weight(model)
    save_model(out, model, donate_model=True)
    save_config(config, out / "config.json")
    shutil.copytree(
        wide, out, ignore=shutil.ignore_patterns("model*", "config.json"), dirs_exist_ok=True
    )
    return size


def print_quantization_cost(run: str | None, wide: Path, few: Path, bits: int) -> None:
    """Prints how a run's model in few bits, a directory or GGUF file, does on held-out problems beside that in 16."""
    try:
        if run is None or (
            (config := evaluate.load_run_config(run, {})).data.task == "own"
            and not config.data.path
        ):
            raise ValueError("only --run of a task with problems tells them")  # replies are none
        hub.find_model(few)  # refuses at once a file that Gwen writes and does not read
        task = tasks.make_task(config, begun=tasks.read_held_out(run))
        print(f"now what {bits} bits cost, by held-out problems; what is written stays", flush=True)
        _, sampled, greedy = evaluate_model(config, task, wide, 16)
        model, *_ = evaluate_model(config, task, few, bits)
        lost, same = (
            evaluate.measure_divergence(model, sampled, 1.0),
            greedy_agreement(model, greedy),
        )  # nats a token, share of tokens
        del model  # one at a time
        base, _ = gwen.load(
            config.model.name,
            adapter=run_files.adapter_path(run, 0),
            end_tokens=config.sampling.end_tokens,
        )
        learned = evaluate.measure_divergence(base, sampled, 1.0)
    except ValueError as error:  # the model is written all the same
        print(escape_invisible(f"what {bits} bits cost was not measured: {error}"))
        return
    begun = run_files.describe_start(config.to_flags())
    print(
        f"{bits} bits are {lost:.2g} nats a token from 16, {lost / max(learned, 1e-9):.2%} of the {learned:.2g} that "
        f"training moved{begun}; {same:.1%} of the tokens of greedy answers stay the likeliest"
    )
    if lost > TOO_MUCH * learned:
        print(
            f"WARNING: {bits} bits move the model by over a third of what training did: take more, or train longer"
        )


def evaluate_model(
    config: Config, task: tasks.Task, place: Path, bits: int
) -> tuple[gwen.Model, list[Sample], list[Sample]]:
    """Evaluates the model at a place as a run does and prints it; returns it, its samples and greedy answers."""
    model, tokenizer = gwen.load(place, end_tokens=config.sampling.end_tokens)
    scored = (
        task.rubric is not None and task.verifier is None and not config.judge.url
    )  # which may cost money
    grader, _ = judge.make_graders(config, task.rubric if scored else None, None)
    found: list[list[Sample]] = []

    def answer(
        problems: list[Example], params: evaluate.EvalParams
    ) -> tuple[list[Sample], list[Sample]]:
        found.extend(both := evaluate.answer_both(model, tokenizer, problems, params))
        return both

    toolbox = episodes.make_toolbox(config, task.tools, task.environments, tokenizer, model.config)
    record, _ = evaluate.evaluate(
        answer, task, evaluate.EvalParams.from_config(config, toolbox=toolbox), grader=grader
    )
    print(f"{bits} bits: {run_files.evaluation_line(record)}", flush=True)
    sampled, greedy = found
    return model, sampled, greedy


def greedy_agreement(model: gwen.Model, greedy: list[Sample]) -> float:
    """The share of the tokens of greedy answers that are the likeliest for this model too."""
    num_same = num_tokens = 0.0
    for batch in alive.Bar(
        make_batches(greedy, POSITIONS, "off"), desc="likeliest tokens", unit="part"
    ):
        likeliest = (completion_hidden_states(model, batch) @ model.head_weight.T).argmax(-1)
        num_same += ((likeliest == batch.completion_ids) * batch.mask).sum().item()
        num_tokens += batch.mask.sum().item()
    return num_same / num_tokens
