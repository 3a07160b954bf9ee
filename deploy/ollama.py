"""
A Modelfile for Ollama: how a model answers there, and where it stops.

Source: https://github.com/ollama/ollama, parser/parser.go.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import Config
from problems import chat_template

# Ollama's defaults draw at temperature 0.8, cut the tail and punish repetition.
MODELFILE = """\
FROM ./{file}
# Greedy, as --temp 0. To draw as training did, write the run's --temp, by default 1.
PARAMETER temperature 0
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER repeat_penalty 1
"""


def write_modelfile(folder: Path, tokenizer: Any, ends: Sequence[int], trained: Config | None) -> None:
    """Writes it beside the folder's GGUF file. ends: ids that end an answer. trained: a run, whose limits it keeps."""
    (file,) = folder.glob("*.gguf")
    lines, end = MODELFILE.format(file=file.name), chat_template.end_of_turn(tokenizer)
    stops = [tokenizer.decode([one]) for one in dict.fromkeys([*ends, *([] if end is None else [end])])]
    if trained:
        stops += trained.sampling.stop
        if trained.objective.loss_type != "sft":  # whose replies may be longer
            lines += f"PARAMETER num_predict {trained.sampling.max_tokens}\n"
    for text in stops:
        marks = '"""' if '"' in text else '"'
        lines += f"PARAMETER stop {marks}{text}{marks}\n"
    (folder / "Modelfile").write_text(lines)
