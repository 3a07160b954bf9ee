"""
The command that writes a trained model for other programs.

`uv run export.py --fuse --run runs/NAME --out DIR` merges an adapter into its model for good.
`--export gguf` does so too, in one file for llama.cpp. `--export peft` writes the adapter alone.

Other programs render a chat with the model's template only. So two of training's settings are
written into the template of a merged model: whether the model thinks, and the task's system prompt.
If all training prompts begin with further messages, they have to be sent in every chat: the
Modelfile makes Ollama send them, and the model card lists them.

This file does not cover adapters (lora.py, disk/adapters.py) or the formats (deploy/).
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
from flags import LEAST_FREE, Parser, line_of, names_path, refuse_full_disk, report_mistakes
from machine import alive, memory
from machine.output import guard_output
from prompts import chat_template
from settings.checks import check_settings
from settings.sources import load_recipe

FEW_BITS = (4, 8)


@guard_output()
@report_mistakes()
def main(argv: list[str] | None = None) -> None:
    parser = Parser("export.py", "Merge an adapter into its model, or write it in another layout.")
    parser.add_argument(
        "--fuse", action="store_true", help="write the merged model, a Hugging Face directory"
    )
    parser.add_argument(
        "--export",
        choices=["peft", "gguf"],
        help="peft: write the adapter alone. gguf: write the merged model in one file",
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=gguf_writer.LABELS,
        help="bits per weight, for --fuse and gguf (default: 16)",
    )
    run_files.add_adapter_flags(parser)
    parser.add_argument(
        "--model", help="demo, a Hugging Face directory or a hub id (default: the adapter's)"
    )
    parser.add_argument(
        "--keep-template", action="store_true", help="leave the base's chat template unchanged"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="new directory to write to"
    )
    args = parser.parse_args(argv)
    if args.fuse == (args.export is not None):
        raise ValueError("give --fuse for a whole model, or --export peft for the adapter alone")
    if args.bits and args.export == "peft":
        raise ValueError(f"--bits {args.bits} is for --fuse and --export gguf; leave it out")
    refuse_taken(args.out)
    adapter = run_files.adapter_from_flags(args, model=None)
    if not adapter:
        raise ValueError("there is no adapter yet; name one with --adapter, or a run with --run")
    export(args, adapter)


def export(args: argparse.Namespace, adapter: str) -> None:
    """Writes the model or adapter to --out, and prints a summary and the commands that use it."""
    run_dir = find_run_dir(args.run or adapter)
    config = None
    if run_dir:
        config = check_settings(load_recipe(run_files.config_file(run_dir)))
    least = least_bytes(args.model, adapter, args.export, args.bits or 16)

    with make_scratch(args.out, least) as scratch:
        wide = scratch / "wide"  # the merged model in 16 bits, if the result has fewer
        result = scratch / "made"
        with blame_output(args.out), alive.show_activity(f"writing {args.out}"):
            run = read_trained_run(config) if config else None
            summary = write_model(args, adapter, run, wide, result)
        shots = run.shots if run else []
        if shots:
            summary += (
                f"; training's prompts begin with {len(shots)} messages more, "
                "which who talks to it must send"
            )
        if args.run:
            if shots:
                summary += ": README.md has them"
            opening = run.opening if run and shots else []
            card = model_card.make_model_card(args.run, args.step, args.export or "mlx", opening)
            with blame_output(args.out):
                (result / "README.md").write_text(card, encoding="utf-8")
        with blame_output(args.out):
            put_into_place(result, args.out)

        print(f"{args.out}: {summary}")
        print_next_commands(args.out, args.export, can_publish="give them the whole" not in summary)
        if args.bits in FEW_BITS:
            few = next(args.out.glob("*.gguf"), args.out)
            few_bits.print_quantization_cost(run_dir, wide, few, args.bits)


def find_run_dir(path: str) -> str | None:
    """The run directory at or above a path, such as an adapter's; None if there is none."""
    place = Path(path).resolve()
    for directory in (place, *place.parents[:3]):
        if (directory / "config.yaml").is_file():
            return str(directory)
    return None


def write_model(
    args: argparse.Namespace, adapter: str, run: TrainedRun | None, wide: Path, result: Path
) -> str:
    """
    Writes the model or adapter to `result`; returns a summary.

    run: the adapter's run; None if it has none. wide: the directory for the model in 16 bits,
    which is written first if the result has fewer bits and is made from it or compared with it.
    """
    has_few_bits = args.bits in FEW_BITS
    template_run = None if args.keep_template else run
    end_tokens = run.config.sampling.end_tokens if run else []
    summary = ""
    if args.fuse or (has_few_bits and run):  # few bits are compared with 16
        fused = wide if has_few_bits else result
        summary = fuse(args.model, adapter, fused, template_run, end_tokens)
    if args.fuse and has_few_bits:
        bits_per_weight = few_bits.quantize_directory(wide, result, args.bits)
        summary += f"; in {bits_per_weight:.3g} bits a weight"
    elif args.export == "gguf":
        title = args.out.resolve().name
        bits = args.bits or 16
        summary = export_gguf(args.model, adapter, result, template_run, title, bits, end_tokens)
    elif args.export:
        summary = export_peft(args.model, adapter, result)
    return summary


def print_next_commands(out: Path, export: str | None, can_publish: bool) -> None:
    """Prints the commands that use the written files elsewhere."""
    path = shlex.quote(str(out))
    name = shlex.quote(out.resolve().name)
    folder = f"~/.lmstudio/models/me/{name}"
    if export == "gguf":
        print(f"for Ollama: ollama create {name} -f {path}/Modelfile && ollama run {name}")
        print(f"for LM Studio: mkdir -p {folder} && cp {path}/*.gguf {folder}/")
    elif export is None:
        print(f"for LM Studio on a Mac: mkdir -p {folder} && cp {path}/* {folder}/")
    if can_publish:
        print(f"to publish it: uv run hf upload OWNER/{name} {path}", flush=True)


# ---- the directory that is written


def refuse_taken(out: Path) -> None:
    """Raises ValueError unless `out` is a new path, an empty directory, or a link to one."""
    try:
        is_taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise ValueError(f"--out {out} cannot be read: {line_of(error)}") from error
    if is_taken:
        raise ValueError(f"--out {out} exists; give a new directory")


def least_bytes(name: str | None, adapter: str, export: str | None, bits: int) -> int:
    """
    A lower bound on the number of bytes that will be written.

    The base's weights have 16 or 32 bits. `--fuse --bits` first writes them with all their bits.
    """
    if export == "peft":
        files = list(adapters.find_adapter(adapter).glob("*.safetensors"))
        return sum(file.stat().st_size for file in files)
    chosen, _ = model_choice.choose_model(name, adapter)
    base = hub.find_model(chosen)
    is_gguf = (base / gguf.LINK).is_file()
    files = [(base / gguf.LINK).resolve()] if is_gguf else list(base.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return size * bits // 32 if export or is_gguf else size


@contextlib.contextmanager
def make_scratch(out: Path, num_bytes: int) -> Iterator[Path]:
    """
    A directory on the disk of `out`, which is removed at the end.

    Inside the context, other libraries write their temporary files there too.

    num_bytes: a lower bound on what will be written. Raises ValueError, before any work, if the
    disk has too little room or cannot be written to.
    """
    target = out.resolve()
    parent = target if target.is_dir() else target.parent
    default_dir = tempfile.tempdir
    try:
        parent.mkdir(parents=True, exist_ok=True)
        refuse_full_disk("--out", out, parent, num_bytes + LEAST_FREE)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {line_of(error)}") from error
    with scratch as directory:
        tempfile.tempdir = directory
        try:
            yield Path(directory)
        finally:
            tempfile.tempdir = default_dir


@contextlib.contextmanager
def blame_output(out: Path) -> Iterator[None]:
    """Inside the context, errors about an output file that cannot be written name --out."""
    try:
        with names_path(out):
            yield
    except (OSError, RuntimeError) as error:
        if memory.should_try_smaller(error):
            raise
        if isinstance(error, OSError) and error.filename and not is_in(error.filename, out):
            raise
        if isinstance(error, OSError) and error.errno:
            reason = line_of(error)
        else:  # "[write] Unable to write 1168 bytes to file"
            free = shutil.disk_usage(out.resolve().parent).free
            reason = f"{hub.first_line(error)} ({free / 1e6:.3g} MB are free there)"
        raise OSError(f"--out {out} cannot be written: {reason}") from error


def is_in(path: str | Path, out: Path) -> bool:
    """Whether a path is in `out`, or in the scratch directory beside it."""
    target = out.resolve()
    place = Path(path).resolve()
    if not place.is_relative_to(target.parent):
        return False
    names = place.relative_to(target.parent).parts
    if not names:
        return False
    return names[0] == target.name or names[0].startswith(f".{target.name}-")


def put_into_place(result: Path, out: Path) -> None:
    """
    Moves a new directory to `out`.

    If `out` exists, only the contents are moved: `out` may be a link, a mount or the current
    directory.
    """
    if not out.exists():
        os.replace(result, out.resolve())
        return
    for part in sorted(result.iterdir()):
        os.replace(part, out / part.name)


# ---- the files that are written


def fuse(
    name: str | None,
    adapter: str,
    out: Path,
    run: TrainedRun | None,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model in its base's dtype; returns a summary.

    run: the run whose prompts the template will render; None leaves the template as it is.
    end_tokens: further tokens that ended completions in training.
    """
    name, _ = model_choice.choose_model(name, adapter)
    if "GWEN_DTYPE" in os.environ:
        dtype = gwen.default_dtype()
    else:
        dtype = stored_dtype(hub.find_model(name))
    model, tokenizer = gwen.load(name, dtype, adapter=adapter, end_tokens=end_tokens)
    note = adapt_template(tokenizer, run) if run else ""
    gwen.save(model, out, tokenizer)
    return f"{name} with {adapter} merged in, {dtype}{note}"


def stored_dtype(directory: Path) -> mx.Dtype:
    """
    The dtype of a checkpoint's largest floating-point tensor.

    Packed weights are integers; there, only tensors such as scales are floating-point.
    """
    link = directory / gguf.LINK
    if link.is_file():
        tensors = gguf.open_file(link.resolve()).tensors
        largest = max(tensors, key=lambda tensor: tensor.n_elements)
        return gguf.WIDE.get(largest.tensor_type.name, mx.float16)
    weights = hub.load_weights(directory).values()
    floating = [tensor for tensor in weights if mx.issubdtype(tensor.dtype, mx.floating)]
    return max(floating, key=lambda tensor: tensor.nbytes).dtype


def adapt_template(tokenizer: Any, run: TrainedRun) -> str:
    """Makes a tokenizer's template render a run's prompts; returns a note on the change."""
    change = chat_template.fix_template(tokenizer, run.system, run.config.sampling.thinking)
    if not change:
        return run.note
    return (
        f"{run.note}; its chat template has {change}, as in training "
        "(--keep-template leaves the base's)"
    )


def export_peft(name: str | None, adapter: str, out: Path) -> str:
    """
    Writes the adapter alone; returns a summary.

    The adapter's configuration names its base, as a path for a bundled model.
    """
    matrices = adapters.read_adapter(adapter)
    base = name or matrices.base
    note = ""
    if base:
        model_choice.warn_of_other_base(adapter, base)
        if hub.is_gguf(base):
            note = (
                f"; other programs do not open {base} as its base: "
                "give them the whole model, by --fuse"
            )
        if base in hub.BUNDLED:
            base = str(hub.BUNDLED[base])
    adapters.write_peft(matrices._replace(base=base), out)
    return f"{adapter} for {base}, in the layout of peft{note}"


def export_gguf(
    name: str | None,
    adapter: str,
    out: Path,
    run: TrainedRun | None,
    title: str,
    bits: int,
    end_tokens: Sequence[str] = (),
) -> str:
    """
    Writes the merged model as a GGUF file named after `title`, and a Modelfile; returns a summary.

    run, end_tokens: see `fuse`.
    """
    name, _ = model_choice.choose_model(name, adapter)
    model_choice.warn_of_other_base(adapter, name)
    directory = hub.find_model(name)
    model = gwen.load_model(directory, mx.float32, adapter, lazy=True)
    tokenizer = hub.load_tokenizer(directory)
    config = model_choice.with_all_end_tokens(model.config, tokenizer, name, end_tokens)
    weights = hub.unfuse_weights(dict(tree_flatten(model.parameters())), config)
    del model  # so that memory holds only the one matrix that the writer reads at a time
    note = adapt_template(tokenizer, run) if run else ""
    summary = gguf_writer.write_gguf(out, title, weights, config, tokenizer, bits)
    run_config = run.config if run else None
    shots = run.shots if run else []
    modelfile_note = ollama.write_modelfile(out, tokenizer, config.end_ids, run_config, shots)
    return f"{summary}, and a Modelfile{modelfile_note}; {name} with {adapter} merged in{note}"


if __name__ == "__main__":
    main()
