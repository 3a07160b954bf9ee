"""
Writes problems of reasoning-gym in the format of NeMo Gym's server `reasoning_gym`.

    uv run --no-project --with reasoning-gym python \
        examples/environments/reasoning_gym_rows.py 160 > sums.jsonl

The problems are sums of two or three numbers with one or two digits, as the model `demo:rg` has
learned them. This file runs in an environment of its own, and not in that of Gwen.
"""

import json
import sys

import reasoning_gym

SYSTEM = "Answer in <answer></answer>."

problems = reasoning_gym.create_dataset(
    "chain_sum", size=int(sys.argv[1]), seed=7, max_terms=3, max_digits=2
)
for problem in problems:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem["question"]},
    ]
    print(json.dumps({"responses_create_params": {"input": messages}, **problem}))
