"""
The command that writes a trained model for other programs.

`uv run export.py --fuse --run runs/NAME --out DIR` merges an adapter into its model and writes the
merged model as a directory. `--export gguf` writes the merged model as one file for llama.cpp.
`--export peft` writes only the adapter.

Other programs know nothing about training except what the model's chat template contains. So two
training settings are written into the chat template of a merged model: the thinking mode and the
task's system prompt. If all training prompts begin with the same example messages, every chat must
begin with these messages too. The Modelfile makes Ollama send them, and the model card lists them.

lora.py and disk/adapters.py read and merge adapters. deploy/ writes the file formats.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cpu_blas  # noqa: F401  (before mlx)
import mlx.core as mx
from mlx.utils import tree_flatten

import gwen
from deploy import few_bits, gguf_writer, ollama
from deploy.training_prompts import ConfigWithOpeningMessages, load_config_and_opening_messages
from disk import adapters, gguf, hub, model_card, model_choice, run_files
from disk.files import first_line_of_error
from flags import (
    MIN_FREE_BYTES,
    Parser,
    add_path_to_os_errors,
    exit_on_mistakes,
    message_with_advice,
    refuse_full_disk,
)
from machine import alive, memory
from machine.output import guard_output
from prompts import chat_template
from settings.checks import check_settings
from settings.sources import load_recipe
from text.commands import is_run_from_checkout
from text.wrapping import print_wrapped

FEW_BITS = (4, 8)


@guard_output()
@exit_on_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        "export.py", "Merge an adapter into its model, or write the adapter in another format."
    )
    parser.add_argument(
        "--fuse",
        action="store_true",
        help="write the merged model as a directory in Hugging Face format",
    )
    parser.add_argument(
        "--export",
        choices=["peft", "gguf"],
        help="peft: write only the adapter; gguf: write the merged model as one file",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=gguf_writer.LABELS,
        help="the number of bits per weight, for --fuse and --export gguf (default: 16)",
    )
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--model",
        help="the base model: demo, a Hugging Face directory or a hub id (default: the model for "
        "which the adapter was trained)",
    )
    parser.add_argument(
        "--keep-template",
        action="store_true",
        help="leave the chat template of the base model unchanged (default: write the thinking "
        "mode and the system prompt of training into the template)",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="the new directory to write to"
    )
    args = parser.parse_args(argv)
    if args.fuse == (args.export is not None):
        raise ValueError(
            "give exactly one of --fuse and --export: --fuse or --export gguf writes a whole "
            "model, and --export peft writes only the adapter"
        )
    if args.bits and args.export == "peft":
        raise ValueError(
            f"--bits {args.bits} applies only to --fuse and --export gguf; leave out --bits"
        )
    raise_if_out_is_taken(args.out)
    adapter = run_files.fill_defaults_and_find_adapter(args, model=None)
    if not adapter:
        raise ValueError("no adapter is given; name one with --adapter, or a run with --run")
    export_and_print_summary(args, adapter)


def export_and_print_summary(args: argparse.Namespace, adapter: str) -> None:
    """
    Writes the model or adapter to --out.

    Then prints a summary and the commands that load the written files. If the weights were rounded
    to few bits, also compares the rounded model with the 16-bit model on held-out problems, and
    prints the result.
    """
    run_dir = find_run_dir_at_or_above(args.run or adapter)
    config = None
    if run_dir:
        config = check_settings(load_recipe(run_files.find_config_file(run_dir)))
    least = least_bytes_to_write(args.model, adapter, args.export, args.bits or 16)

    with make_and_set_temp_dir_beside(args.out, least) as scratch:
        # a directory for the merged 16-bit model, which is needed only if `result_dir` gets a model
        # of fewer bits
        bits16_dir = scratch / "wide"
        result_dir = scratch / "made"
        with name_out_in_write_errors(args.out), alive.show_activity(f"writing {args.out}"):
            run = load_config_and_opening_messages(config) if config else None
            summary = write_export_and_return_summary(args, adapter, run, bits16_dir, result_dir)
        shots = run.shots if run else []
        if shots:
            summary += (
                f"; all training prompts begin with the same {len(shots)} example messages, so "
                "begin every chat with these messages"
            )
        if args.run:
            if shots:
                summary += " (README.md lists them)"
            opening = run.opening_messages if run and shots else []
            card = model_card.make_model_card(args.run, args.step, args.export or "mlx", opening)
            with name_out_in_write_errors(args.out):
                (result_dir / "README.md").write_text(card, encoding="utf-8")
        with name_out_in_write_errors(args.out):
            move_directory_or_contents(result_dir, args.out)

        print_wrapped(f"{args.out}: {summary}")
        print_next_commands(args.out, args.export, can_publish="give them the whole" not in summary)
        if args.bits in FEW_BITS:
            rounded = next(args.out.glob("*.gguf"), args.out)
            few_bits.measure_and_print_quantization_cost(run_dir, bits16_dir, rounded, args.bits)


def find_run_dir_at_or_above(path: str) -> str | None:
    """
    The first run directory among the path and its three closest parents.

    Returns None if none of them is a run directory.
    """
    resolved = Path(path).resolve()
    for directory in (resolved, *resolved.parents[:3]):
        if (directory / "config.yaml").is_file():
            return str(directory)
    return None


def write_export_and_return_summary(
    args: argparse.Namespace,
    adapter: str,
    run: ConfigWithOpeningMessages | None,
    bits16_dir: Path,
    result_dir: Path,
) -> str:
    """
    Writes the model or adapter to `result_dir`, and returns a summary.

    run: the run that trained the adapter, or None if the run is unknown.
    bits16_dir: the directory for the 16-bit model. This model is written, before the result, only
        if the result has few bits. The result is then rounded from this model or compared with it.
    """
    has_few_bits = args.bits in FEW_BITS
    template_run = None if args.keep_template else run
    end_tokens = run.config.sampling.end_tokens if run else []
    summary = ""
    # a result with few bits is compared with the 16-bit model
    if args.fuse or (has_few_bits and run):
        fused = bits16_dir if has_few_bits else result_dir
        summary = write_merged_model_and_return_summary(
            args.model, adapter, fused, template_run, end_tokens
        )
    if args.fuse and has_few_bits:
        bits_per_weight = few_bits.write_quantized_copy(bits16_dir, result_dir, args.bits)
        summary += f"; rounded to {bits_per_weight:.3g} bits per weight"
    elif args.export == "gguf":
        title = args.out.resolve().name
        bits = args.bits or 16
        summary = write_gguf_modelfile_and_return_summary(
            args.model, adapter, result_dir, template_run, title, bits, end_tokens
        )
    elif args.export:
        summary = write_peft_adapter_and_return_summary(args.model, adapter, result_dir)
    return summary


def print_next_commands(out: Path, export: str | None, can_publish: bool) -> None:
    """Prints the commands that load the written files into other programs or publish them."""
    path = shlex.quote(str(out))
    name = shlex.quote(out.resolve().name)
    folder = f"~/.lmstudio/models/me/{name}"
    if export == "gguf":
        print_wrapped(f"for Ollama: ollama create {name} -f {path}/Modelfile && ollama run {name}")
        print_wrapped(f"for LM Studio: mkdir -p {folder} && cp {path}/*.gguf {folder}/")
    elif export is None:
        print_wrapped(f"for LM Studio on a Mac: mkdir -p {folder} && cp {path}/* {folder}/")
    if can_publish:
        upload = "uv run hf upload" if is_run_from_checkout() else "hf upload"
        print_wrapped(f"to publish the files: {upload} OWNER/{name} {path}")


# ---- the output directory


def raise_if_out_is_taken(out: Path) -> None:
    """Raises ValueError unless `out` does not exist or is an empty directory."""
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise ValueError(f"--out {out} cannot be read: {message_with_advice(error)}") from error
    if is_taken:
        raise ValueError(f"--out {out} exists and is not empty; give a new directory")


def least_bytes_to_write(
    model_name: str | None, adapter: str, export: str | None, bits: int
) -> int:
    """
    A lower bound on the number of bytes that will be written.

    For `--export peft`, the bound is the size of the adapter. For `--export gguf`, or if the base
    model is a GGUF file, the bound is the size of the base model times `bits` / 32, because a
    weight of the base model has at most 32 bits. Otherwise the bound is the size of the base model,
    because `--fuse`, even with `--bits`, first writes a copy in which the weights keep all their
    bits.
    """
    if export == "peft":
        files = list(adapters.find_adapter_directory(adapter).glob("*.safetensors"))
        return sum(file.stat().st_size for file in files)
    chosen, _ = model_choice.choose_model_and_reason(model_name, adapter)
    base = hub.find_model_directory(chosen)
    is_gguf_model = (base / gguf.LINK).is_file()
    files = [(base / gguf.LINK).resolve()] if is_gguf_model else list(base.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return size * bits // 32 if export or is_gguf_model else size


@contextlib.contextmanager
def make_and_set_temp_dir_beside(out: Path, num_bytes: int) -> Iterator[Path]:
    """
    Makes a temporary directory beside `out`, and removes it after the context.

    If `out` exists, the temporary directory is inside `out`. Inside the context, `tempfile` uses
    the temporary directory, so other libraries also write to the disk of `out`.

    num_bytes: a lower bound on the number of bytes that will be written.

    Raises ValueError at once if the disk has too little free space or cannot be written to.
    """
    target = out.resolve()
    parent = target if target.is_dir() else target.parent
    default_dir = tempfile.tempdir
    try:
        parent.mkdir(parents=True, exist_ok=True)
        refuse_full_disk("--out", out, parent, num_bytes + MIN_FREE_BYTES)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {message_with_advice(error)}") from error
    with scratch as directory:
        tempfile.tempdir = directory
        try:
            yield Path(directory)
        finally:
            tempfile.tempdir = default_dir


@contextlib.contextmanager
def name_out_in_write_errors(out: Path) -> Iterator[None]:
    """Inside the context, an error in writing the output becomes an OSError that names --out."""
    try:
        with add_path_to_os_errors(out):
            yield
    except (OSError, RuntimeError) as error:
        if memory.should_retry_with_less_work(error):
            raise
        if (
            isinstance(error, OSError)
            and error.filename
            and not is_in_out_or_scratch(error.filename, out)
        ):
            raise
        if isinstance(error, OSError) and error.errno:
            reason = message_with_advice(error)
        else:  # for example "[write] Unable to write 1168 bytes to file"
            free = shutil.disk_usage(out.resolve().parent).free
            reason = f"{first_line_of_error(error)} ({free / 1e6:.3g} MB are free on its disk)"
        raise OSError(f"--out {out} cannot be written: {reason}") from error


def is_in_out_or_scratch(path: str | Path, out: Path) -> bool:
    """Whether a path is in `out` or in the temporary directory beside `out`."""
    target = out.resolve()
    resolved = Path(path).resolve()
    if not resolved.is_relative_to(target.parent):
        return False
    names = resolved.relative_to(target.parent).parts
    if not names:
        return False
    return names[0] == target.name or names[0].startswith(f".{target.name}-")


def move_directory_or_contents(source: Path, out: Path) -> None:
    """
    Moves the directory `source` to `out`.

    If `out` exists, only the contents of `source` are moved, because `out` may be a link, a mount
    point or the current directory.
    """
    if not out.exists():
        os.replace(source, out.resolve())
        return
    for part in sorted(source.iterdir()):
        os.replace(part, out / part.name)


# ---- the output files


def write_merged_model_and_return_summary(
    model_name: str | None,
    adapter: str,
    out: Path,
    run: ConfigWithOpeningMessages | None,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model in the dtype of its base model, and returns a summary.

    If GWEN_DTYPE is set, the merged model is written in that dtype instead.

    run: the run to whose prompts the chat template is adapted; None leaves the template unchanged.
    end_tokens: additional tokens that ended completions in training.
    """
    name, _ = model_choice.choose_model_and_reason(model_name, adapter)
    if "GWEN_DTYPE" in os.environ:
        dtype = gwen.dtype_from_env_or_device()
    else:
        dtype = dtype_of_largest_float_tensor(hub.find_model_directory(name))
    model, tokenizer = gwen.load(name, dtype, adapter=adapter, end_tokens=end_tokens)
    note = adapt_template_and_return_note(tokenizer, run) if run else ""
    gwen.save(model, out, tokenizer)
    return f"{name} with {adapter} merged in, {dtype}{note}"


def dtype_of_largest_float_tensor(directory: Path) -> mx.Dtype:
    """
    The dtype of a checkpoint's largest floating-point tensor.

    In a checkpoint of packed weights, which are integers, only tensors such as scales are
    floating-point.
    """
    link = directory / gguf.LINK
    if link.is_file():
        tensors = gguf.open_gguf_file(link.resolve()).tensors
        largest = max(tensors, key=lambda tensor: tensor.n_elements)
        return gguf.WIDE.get(largest.tensor_type.name, mx.float16)
    weights = hub.load_weights_by_hub_name(directory).values()
    floating = [tensor for tensor in weights if mx.issubdtype(tensor.dtype, mx.floating)]
    return max(floating, key=lambda tensor: tensor.nbytes).dtype


def adapt_template_and_return_note(tokenizer: Any, run: ConfigWithOpeningMessages) -> str:
    """
    Changes a tokenizer's chat template so that it renders prompts as the run did.

    Returns a note about the change, to be appended to the summary.
    """
    change = chat_template.add_settings_to_template_and_describe(
        tokenizer, run.system, run.config.sampling.thinking
    )
    if not change:
        return run.note
    return (
        f"{run.note}; its chat template has {change}, as in training "
        "(--keep-template keeps the template of the base model)"
    )


def write_peft_adapter_and_return_summary(model_name: str | None, adapter: str, out: Path) -> str:
    """
    Writes only the adapter, in PEFT format, and returns a summary.

    The written configuration names the base model. If the base model comes with Gwen, the
    configuration contains its path instead.
    """
    matrices = adapters.read_lora_adapter(adapter)
    base = model_name or matrices.base
    note = ""
    if base:
        model_choice.warn_of_different_base(adapter, base)
        if hub.is_gguf_model(base):
            note = (
                f"; other programs cannot load {base} as the base model, so "
                "give them the whole model, written with --fuse"
            )
        if base in hub.BUNDLED:
            base = str(hub.BUNDLED[base])
    adapters.write_peft_adapter(matrices._replace(base=base), out)
    return f"{adapter} for {base}, in PEFT format{note}"


def write_gguf_modelfile_and_return_summary(
    model_name: str | None,
    adapter: str,
    out: Path,
    run: ConfigWithOpeningMessages | None,
    title: str,
    bits: int,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model as a GGUF file, with a Modelfile for Ollama. Returns a summary.

    title: the first part of the GGUF file's name.
    run, end_tokens: the same as for `write_merged_model_and_return_summary`.
    """
    name, _ = model_choice.choose_model_and_reason(model_name, adapter)
    model_choice.warn_of_different_base(adapter, name)
    directory = hub.find_model_directory(name)
    model = gwen.load_model(directory, mx.float32, adapter, lazy=True)
    tokenizer = hub.load_tokenizer(directory)
    config = model_choice.add_and_print_missing_end_tokens(
        model.config, tokenizer, name, end_tokens
    )
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    del model  # afterwards, only the matrix that the writer currently reads is in memory
    note = adapt_template_and_return_note(tokenizer, run) if run else ""
    summary = gguf_writer.write_gguf_and_return_summary(
        out, title, weights, config, tokenizer, bits
    )
    run_config = run.config if run else None
    shots = run.shots if run else []
    modelfile_note = ollama.write_modelfile_and_return_note(
        out, tokenizer, config.end_ids, run_config, shots
    )
    return f"{summary}, and a Modelfile{modelfile_note}; {name} with {adapter} merged in{note}"


if __name__ == "__main__":
    main()
