"""
The command that writes a trained model for other programs.

`uv run export.py --fuse --run runs/NAME --out DIR` merges an adapter into its model and writes the
merged model as a directory. `--export gguf` writes the merged model as one file for llama.cpp.
`--export peft` writes only the adapter.

Other programs render a chat only with the model's chat template. So two training settings
are written into the chat template of a merged model, namely the thinking mode and the task's system
prompt.
If all training prompts begin with further messages, these messages must be sent in every chat. The
Modelfile makes Ollama send them, and the model card lists them.

Adapters are in lora.py and disk/adapters.py, and the formats are in deploy/.
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
from deploy.training_prompts import TrainedRun, read_trained_run
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
from text.commands import is_checkout

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
        help="leave the chat template of the base model unchanged",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="the new directory to write to"
    )
    args = parser.parse_args(argv)
    if args.fuse == (args.export is not None):
        raise ValueError(
            "give --fuse or --export gguf to write a whole model, or --export peft to write only "
            "the adapter"
        )
    if args.bits and args.export == "peft":
        raise ValueError(f"--bits {args.bits} is for --fuse and --export gguf; leave it out")
    raise_if_out_is_taken(args.out)
    adapter = run_files.fill_defaults_and_find_adapter(args, model=None)
    if not adapter:
        raise ValueError("no adapter is given; name one with --adapter, or a run with --run")
    write_and_print_summary(args, adapter)


def write_and_print_summary(args: argparse.Namespace, adapter: str) -> None:
    """
    Writes the model or adapter to --out.

    Also prints a summary, the commands that use the written files, and the effect of rounding.
    """
    run_dir = find_run_dir_at_or_above(args.run or adapter)
    config = None
    if run_dir:
        config = check_settings(load_recipe(run_files.find_config_file(run_dir)))
    least = least_bytes_to_write(args.model, adapter, args.export, args.bits or 16)

    with make_temporary_directory_beside(args.out, least) as scratch:
        wide = scratch / "wide"  # the merged model in 16 bits, if the result has fewer bits
        result = scratch / "made"
        with name_out_in_write_errors(args.out), alive.show_activity(f"writing {args.out}"):
            run = read_trained_run(config) if config else None
            summary = write_model_or_adapter(args, adapter, run, wide, result)
        shots = run.shots if run else []
        if shots:
            summary += (
                f"; all training prompts begin with {len(shots)} further messages, which you must "
                "send in every chat"
            )
        if args.run:
            if shots:
                summary += " (README.md lists them)"
            opening = run.opening_messages if run and shots else []
            card = model_card.make_model_card(args.run, args.step, args.export or "mlx", opening)
            with name_out_in_write_errors(args.out):
                (result / "README.md").write_text(card, encoding="utf-8")
        with name_out_in_write_errors(args.out):
            move_into_place(result, args.out)

        print(f"{args.out}: {summary}")
        print_next_commands(args.out, args.export, can_publish="give them the whole" not in summary)
        if args.bits in FEW_BITS:
            few = next(args.out.glob("*.gguf"), args.out)
            few_bits.measure_and_print_quantization_cost(run_dir, wide, few, args.bits)


def find_run_dir_at_or_above(path: str) -> str | None:
    """
    The path itself or the nearest parent directory that is a run directory.

    Returns None if there is no such directory.
    """
    resolved = Path(path).resolve()
    for directory in (resolved, *resolved.parents[:3]):
        if (directory / "config.yaml").is_file():
            return str(directory)
    return None


def write_model_or_adapter(
    args: argparse.Namespace, adapter: str, run: TrainedRun | None, wide: Path, result: Path
) -> str:
    """
    Writes the model or adapter to `result`, and returns a summary.

    run: the run that trained the adapter, or None if the run is unknown.
    wide: the directory for the 16-bit model. This model is written first if the result has fewer
        bits and is made from the 16-bit model or compared with it.
    """
    has_few_bits = args.bits in FEW_BITS
    template_run = None if args.keep_template else run
    end_tokens = run.config.sampling.end_tokens if run else []
    summary = ""
    # a result with few bits is compared with the 16-bit model
    if args.fuse or (has_few_bits and run):
        fused = wide if has_few_bits else result
        summary = write_merged_model(args.model, adapter, fused, template_run, end_tokens)
    if args.fuse and has_few_bits:
        bits_per_weight = few_bits.write_quantized_copy(wide, result, args.bits)
        summary += f"; rounded to {bits_per_weight:.3g} bits per weight"
    elif args.export == "gguf":
        title = args.out.resolve().name
        bits = args.bits or 16
        summary = write_gguf_and_modelfile(
            args.model, adapter, result, template_run, title, bits, end_tokens
        )
    elif args.export:
        summary = write_peft_adapter(args.model, adapter, result)
    return summary


def print_next_commands(out: Path, export: str | None, can_publish: bool) -> None:
    """Prints the commands that load the written files into other programs or publish them."""
    path = shlex.quote(str(out))
    name = shlex.quote(out.resolve().name)
    folder = f"~/.lmstudio/models/me/{name}"
    if export == "gguf":
        print(f"for Ollama: ollama create {name} -f {path}/Modelfile && ollama run {name}")
        print(f"for LM Studio: mkdir -p {folder} && cp {path}/*.gguf {folder}/")
    elif export is None:
        print(f"for LM Studio on a Mac: mkdir -p {folder} && cp {path}/* {folder}/")
    if can_publish:
        upload = "uv run hf upload" if is_checkout() else "hf upload"
        print(f"to publish the files: {upload} OWNER/{name} {path}", flush=True)


# ---- the output directory


def raise_if_out_is_taken(out: Path) -> None:
    """Raises ValueError unless `out` is a new path, or an empty directory or a link to one."""
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

    The weights of the base model have 16 or 32 bits. `--fuse --bits` first writes these weights
    with all their bits.
    """
    if export == "peft":
        files = list(adapters.find_adapter_directory(adapter).glob("*.safetensors"))
        return sum(file.stat().st_size for file in files)
    chosen, _ = model_choice.choose_model(model_name, adapter)
    base = hub.find_model_directory(chosen)
    is_gguf_model = (base / gguf.LINK).is_file()
    files = [(base / gguf.LINK).resolve()] if is_gguf_model else list(base.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return size * bits // 32 if export or is_gguf_model else size


@contextlib.contextmanager
def make_temporary_directory_beside(out: Path, num_bytes: int) -> Iterator[Path]:
    """
    A temporary directory on the same disk as `out`, which is removed after the context.

    Inside the context, other libraries write their temporary files to this directory too.

    num_bytes: a lower bound on the number of bytes that will be written.

    Raises ValueError, before any work is done, if the disk has too little free space or cannot be
    written to.
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
    """Inside the context, an error that is raised while output is written names --out."""
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
    """Whether a path is in `out` or in the scratch directory next to `out`."""
    target = out.resolve()
    resolved = Path(path).resolve()
    if not resolved.is_relative_to(target.parent):
        return False
    names = resolved.relative_to(target.parent).parts
    if not names:
        return False
    return names[0] == target.name or names[0].startswith(f".{target.name}-")


def move_into_place(result: Path, out: Path) -> None:
    """
    Moves the directory `result` to `out`.

    If `out` exists, only the contents of `result` are moved, because `out` may be a link, a mount
    point or the current directory.
    """
    if not out.exists():
        os.replace(result, out.resolve())
        return
    for part in sorted(result.iterdir()):
        os.replace(part, out / part.name)


# ---- the output files


def write_merged_model(
    model_name: str | None,
    adapter: str,
    out: Path,
    run: TrainedRun | None,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model in the dtype of its base model, and returns a summary.

    If GWEN_DTYPE is set, the merged model is written in that dtype instead.
    run: the run whose prompts the template will render; if None, the template is not changed.
    end_tokens: additional tokens that ended completions in training.
    """
    name, _ = model_choice.choose_model(model_name, adapter)
    if "GWEN_DTYPE" in os.environ:
        dtype = gwen.default_dtype()
    else:
        dtype = stored_weight_dtype(hub.find_model_directory(name))
    model, tokenizer = gwen.load(name, dtype, adapter=adapter, end_tokens=end_tokens)
    note = adapt_template(tokenizer, run) if run else ""
    gwen.save(model, out, tokenizer)
    return f"{name} with {adapter} merged in, {dtype}{note}"


def stored_weight_dtype(directory: Path) -> mx.Dtype:
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
    weights = hub.load_weights(directory).values()
    floating = [tensor for tensor in weights if mx.issubdtype(tensor.dtype, mx.floating)]
    return max(floating, key=lambda tensor: tensor.nbytes).dtype


def adapt_template(tokenizer: Any, run: TrainedRun) -> str:
    """Makes a tokenizer's template render prompts as in a run, and returns a note for users."""
    change = chat_template.fix_template_for_other_programs(
        tokenizer, run.system, run.config.sampling.thinking
    )
    if not change:
        return run.note
    return (
        f"{run.note}; its chat template has {change}, as in training "
        "(--keep-template keeps the template of the base model)"
    )


def write_peft_adapter(model_name: str | None, adapter: str, out: Path) -> str:
    """
    Writes only the adapter, in PEFT format, and returns a summary.

    The written configuration names the base model. A bundled base model is named by its path.
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


def write_gguf_and_modelfile(
    model_name: str | None,
    adapter: str,
    out: Path,
    run: TrainedRun | None,
    title: str,
    bits: int,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model as a GGUF file, and a Modelfile for Ollama, and returns a summary.

    title: the first part of the GGUF file's name.
    run, end_tokens: the same as for `write_merged_model`.
    """
    name, _ = model_choice.choose_model(model_name, adapter)
    model_choice.warn_of_different_base(adapter, name)
    directory = hub.find_model_directory(name)
    model = gwen.load_model(directory, mx.float32, adapter, lazy=True)
    tokenizer = hub.load_tokenizer(directory)
    config = model_choice.copy_with_all_end_tokens(model.config, tokenizer, name, end_tokens)
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    del model  # afterwards, only the matrix that the writer currently reads is in memory
    note = adapt_template(tokenizer, run) if run else ""
    summary = gguf_writer.write_gguf(out, title, weights, config, tokenizer, bits)
    run_config = run.config if run else None
    shots = run.shots if run else []
    modelfile_note = ollama.write_modelfile(out, tokenizer, config.end_ids, run_config, shots)
    return f"{summary}, and a Modelfile{modelfile_note}; {name} with {adapter} merged in{note}"


if __name__ == "__main__":
    main()
