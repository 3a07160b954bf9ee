"""
Writes a merged model in 8 or 4 bits, and measures how much the rounding changes the model.

mlx_lm packs the weights. The effect of rounding is measured for a packed directory or a GGUF file,
in two ways. First, the model is evaluated on held-out problems. Second, the distance that rounding
moves the model is compared with the distance that training moved the model. Both distances are
divergences on the model's own answers. The number of changed weights would not be informative:
rounding changes most weights, but each change is small, and together they have little effect.

Calibration with data is not implemented here, because mlx_lm has commands for it.
"""

import contextlib
import shutil
import sys
from pathlib import Path

import cpu_blas  # noqa: F401  (before mlx)
from mlx.utils import tree_flatten

import gwen
import judge
import tasks
from config import Config
from disk import eval_record, hub, model_card, run_files
from evaluation import measures, policy, score_task
from machine import alive
from prompts.examples import Example
from step.batch import completion_hidden_states, make_batches
from step.sample import Sample
from text.printable import escape_invisible
from text.wrapping import print_wrapped
from tools import toolbox as toolbox_module

# A warning is printed if rounding moves the model by more than this fraction of the distance that
# training moved it.
TOO_MUCH = 1 / 3
# The number of positions in a forward pass; the logits of all these positions are in memory.
POSITIONS = 256

SampledAndGreedyAnswers = tuple[list[Sample], list[Sample]]
ModelAndAnswers = tuple[gwen.Model, list[Sample], list[Sample]]
BitsPerWeight = float


def write_quantized_copy(model_directory: Path, out: Path, bits: int) -> BitsPerWeight:
    """
    Writes a packed copy of a model's directory, as `mlx_lm.convert -q` does.

    Returns the mean number of bits per weight. Raises ValueError if none of the weights can be
    packed.
    """
    from mlx_lm.utils import (
        compute_bits_per_weight,
        load_model,
        quantize_model,
        save_config,
        save_model,
    )

    model, config = load_model(model_directory, lazy=True)
    with contextlib.redirect_stdout(sys.stderr):
        model, config = quantize_model(model, config, None, bits)
    names = [name for name, _ in tree_flatten(model.parameters())]
    if not any(name.endswith(".scales") for name in names):
        raise ValueError(
            f"--bits {bits}: mlx_lm packs 64 columns at a time, but no width of this model is a "
            "multiple of 64; leave out --bits"
        )
    bits_per_weight: float = compute_bits_per_weight(model)
    save_model(out, model, donate_model=True)
    save_config(config, out / "config.json")
    weights_and_config = shutil.ignore_patterns("model*", "config.json")
    shutil.copytree(model_directory, out, ignore=weights_and_config, dirs_exist_ok=True)
    return bits_per_weight


def measure_and_print_quantization_cost(
    run: str | None, sixteen_bit_directory: Path, few_bits_path: Path, bits: int
) -> None:
    """
    Compares a run's rounded model with its 16-bit model, and prints the result.

    The comparison uses held-out problems of the run.

    sixteen_bit_directory: the directory of the 16-bit model.
    few_bits_path: the directory or GGUF file of the rounded model.
    """
    try:
        config = load_config_and_require_problems(run)
        # raise an error at once if Gwen cannot read the file that it wrote
        hub.find_model_directory(few_bits_path)
        assert run is not None
        task = tasks.make_task(config, held_out_keys=tasks.read_held_out_keys(run))
        print_wrapped(
            f"the model has been written; now measuring the effect of {bits} bits on held-out "
            "problems (you may stop the measurement with Ctrl-C)"
        )
        _, sampled, greedy = evaluate_and_print_model(config, task, sixteen_bit_directory, 16)
        model, _, _ = evaluate_and_print_model(config, task, few_bits_path, bits)
        rounding_kl = measures.mean_kl_to_reference(model, sampled, 1.0)  # nats per token
        agreement = greedy_agreement_fraction(model, greedy)
        del model  # only one model is in memory at a time
        base, _ = gwen.load(
            config.model.name,
            adapter=run_files.adapter_path_at_step(run, 0),
            end_tokens=config.sampling.end_tokens,
        )
        training_kl = measures.mean_kl_to_reference(base, sampled, 1.0)
    except ValueError as error:  # the model has already been written, so this is not fatal
        print_wrapped(escape_invisible(f"the effect of {bits} bits was not measured: {error}"))
        return

    fraction = rounding_kl / max(training_kl, 1e-9)
    beginning = model_card.describe_initial_adapter(config.to_flags())
    print_wrapped(
        f"rounding to {bits} bits moved the model by {rounding_kl:.2g} nats per token, which is "
        f"{fraction:.2%} of the {training_kl:.2g} nats per token by which training moved the model"
        f"{beginning}; "
        f"{agreement:.1%} of the tokens in greedy answers are still the likeliest tokens"
    )
    if rounding_kl > TOO_MUCH * training_kl:
        print_wrapped(
            f"WARNING: rounding to {bits} bits changed the model by more than a third as much as "
            "training did; use more bits, or train longer"
        )


def load_config_and_require_problems(run: str | None) -> Config:
    """
    Returns the settings of a run, after checking that its task has problems to solve.

    Raises ValueError if there is no run, or if the run has only replies to imitate, as a run with
    --loss-type sft may have.
    """
    reason = "the measurement needs --run, with a run whose task has problems to solve"
    if run is None:
        raise ValueError(reason)
    config = policy.load_run_config_and_set_template_date(run, {})
    if config.data.task == "own" and not config.data.path:  # such a run has replies but no problems
        raise ValueError(reason)
    return config


def evaluate_and_print_model(
    config: Config, task: tasks.Task, model_path: Path, bits: int
) -> ModelAndAnswers:
    """
    Evaluates a model in the same way as its run does, and prints the result.

    Returns the model, its sampled answers and its greedy answers.
    """
    model, tokenizer = gwen.load(model_path, end_tokens=config.sampling.end_tokens)
    # A judge on a server is not used here, because it may cost money.
    needs_judge = task.rubric is not None and task.verifier is None and not config.judge.url
    rubric = task.rubric if needs_judge else None
    grader, _ = judge.make_judge_and_witness(config, rubric, None)
    answers: list[list[Sample]] = []

    def answer_and_keep_samples(
        problems: list[Example], params: score_task.EvalParams
    ) -> SampledAndGreedyAnswers:
        sampled, greedy = score_task.answer_sampled_and_greedy(model, tokenizer, problems, params)
        answers.extend((sampled, greedy))
        return sampled, greedy

    toolbox = toolbox_module.make_toolbox(
        config, task.tools, task.environments, tokenizer, model.config
    )
    params = score_task.EvalParams.from_config(config, toolbox=toolbox)
    record, _ = score_task.evaluate_task(answer_and_keep_samples, task, params, grader=grader)
    print_wrapped(f"{bits} bits: {eval_record.format_evaluation_line(record)}")
    sampled, greedy = answers
    return model, sampled, greedy


def greedy_agreement_fraction(model: gwen.Model, greedy_samples: list[Sample]) -> float:
    """The fraction of the tokens in greedy answers that are also the likeliest under `model`."""
    num_equal = 0.0
    num_tokens = 0.0
    batches = make_batches(greedy_samples, POSITIONS, "off")
    for batch in alive.Bar(batches, desc="likeliest tokens", unit="part"):
        logits = completion_hidden_states(model, batch) @ model.head_weight.T
        is_equal = (logits.argmax(-1) == batch.completion_ids) * batch.mask
        num_equal += is_equal.sum().item()
        num_tokens += batch.mask.sum().item()
    return num_equal / num_tokens
