"""
An outside harness for tests: it plays the game of tasks/guess.py, or misbehaves.

    python tests/harness.py MODE [NUM_EXAMPLES]

It speaks the protocol of serving/harness.py, and takes no part of serving/. The conversation is
rendered with the functions that the tools of a run use, so that both play exactly the same game.
"""

import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

MODE = sys.argv[1].removesuffix(" numbered")
HAS_NUMBERED_PROMPTS = sys.argv[1] != MODE
NUM_EXAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 8
MAX_TURNS = 6
OUT = os.fdopen(os.dup(1), "w")
LOCK = threading.Lock()
POLICY = {}
RUNNING = set()  # the numbers of the episodes that are being played


def send(**message):
    with LOCK:
        if message["type"] == "result":
            RUNNING.discard(message["episode"])
        OUT.write(json.dumps(message) + "\n")
        OUT.flush()


def ask(session, ids):
    """One turn of the policy: its ids, log-probabilities and finish reason."""
    body = {"model": POLICY["model"], "token_ids": ids, "sampling_params": {"logprobs": 1}}
    if MODE == "hot":
        body["sampling_params"]["temperature"] = 7.0
    if MODE == "short turns":
        body["sampling_params"]["max_tokens"] = 5
    request = urllib.request.Request(
        POLICY["url"].removesuffix("/v1") + "/inference/v1/generate",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {os.environ['GWEN_ENV_TOKEN']}",
            "Content-Type": "application/json",
            "X-Session-ID": session,
        },
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        choice = json.load(response)["choices"][0]
    return (
        choice["token_ids"],
        [entry["logprob"] for entry in choice["logprobs"]["content"]],
        choice["finish_reason"],
    )


class Player:
    """Renders and plays the game as tools/episodes.py does."""

    def __init__(self):
        from transformers import AutoTokenizer

        from prompts import chat_template
        from tasks.guess import Guess
        from tools import calls

        self.tokenizer = AutoTokenizer.from_pretrained(POLICY["tokenizer"])
        self.schemas = calls.make_environment_schemas(Guess)
        self.parse_call = calls.choose_call_parser(self.tokenizer.chat_template)
        self.end_ids = POLICY["end_ids"]
        self.codec = calls.TurnCodec(self.tokenizer, self.end_ids, thinking=False)
        self.calls, self.template, self.game = calls, chat_template, Guess

    def play(self, message):
        number, session = message["episode"], f"session {message['episode']}"
        game = self.game()
        with LOCK:
            state = random.getstate()
            random.seed(zlib.crc32(message["seed"].encode()))
            prompt = game.reset()
            random.setstate(state)
        if HAS_NUMBERED_PROMPTS:
            prompt += f" This is game {message['example']}."
        send(type="session", episode=number, session=session)
        tools = list(self.schemas.values())
        ids = self.template.encode_chat(self.tokenizer, prompt, tools=tools, thinking=False)
        own, logprobs, messages = [], [], []
        try:
            for turn in range(MAX_TURNS):
                turn_ids, turn_logprobs, reason = ask(session, ids)
                own += range(len(ids), len(ids) + len(turn_ids))
                logprobs += turn_logprobs
                ids = ids + turn_ids
                text = self.codec.decode_turn(turn_ids)
                messages.append({"role": "assistant", "content": text})
                calls = self.calls.parse_calls(text, self.parse_call, self.schemas)
                if reason == "length" and MODE != "short turns":
                    break
                if not calls:
                    break
                replies = [self.reply(game, call) for call in calls]
                messages += replies
                if turn == MAX_TURNS - 1:
                    break
                ids = ids + self.codec.encode_between_turns(replies, tools)
                if MODE == "wrong ids" and number % 2:
                    ids[3] += 1
        except urllib.error.HTTPError as error:
            if MODE != "plain" or error.code != 400:
                send(type="result", episode=number, error=error.read().decode())
                return
        result = {
            "token_ids": ids,
            "own": own,
            "logprobs": logprobs,
            "reward": game.get_reward(),
            "metrics": {"turns": float(len(messages))},
            "messages": messages,
        }
        if MODE == "wrong result" and number % 2:
            result["own"] = own[1:]
        if MODE.startswith("only") and number % 8 not in map(int, MODE.split()[1:]):
            result = {"error": "this episode fails"}
        if MODE == "odd":
            result["metrics"] = {"": 1e15, "a b\nc": -3, "reward/mean": 2, "é" * 300: 0.5}
            result["messages"] = [{"role": "robot", "content": "\x1b[31m\ud800\0", "name": ""}] * 3
        if MODE == "bad reward" and number % 2:
            result["reward"] = "much"
        send(type="result", episode=number, **result)

    def reply(self, game, call):
        if call.error:
            text = json.dumps({"error": call.error}, ensure_ascii=False)
        else:
            try:
                text = game.guess(**call.arguments)
            except Exception as error:
                text = json.dumps({"error": f"{type(error).__name__}: {error}"}, ensure_ascii=False)
        return {"role": "tool", "name": call.name or "tool", "content": text}


def main():
    if MODE == "broken":
        raise RuntimeError("this harness is broken")
    if MODE == "silent":
        time.sleep(600)
    if MODE == "nonsense":
        print("hello", file=OUT, flush=True)
        time.sleep(600)
    rows = [{"prompt": "I think of a number from 1 to 20. Find it."}] * NUM_EXAMPLES
    if MODE == "odd":
        rows = [
            row | {"answer": {"\ud800": [10**300]}, "name": "\ud800\n", "category": "x/y"}
            for row in rows
        ]
    if MODE.startswith("example"):
        rows[1] = json.loads(MODE.removeprefix("example"))
    if MODE == "no held-out":
        send(type="ready", train=rows, held_out=[])
    elif MODE.startswith("at once"):
        send(type="ready", train=rows, held_out=rows[:4], at_once=json.loads(MODE.split()[2]))
    else:
        send(type="ready", train=rows, held_out=rows[:4])
    if MODE == "flood":
        while True:
            send(type="result", episode=1, noise="x" * 1000)
    player, pool, num_played = None, ThreadPoolExecutor(512), 0
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "policy":
            POLICY.update(message)
            player = Player()
        if message["type"] == "play":
            num_played += 1
            with LOCK:
                RUNNING.add(message["episode"])
                if MODE.startswith("at once") and len(RUNNING) > int(MODE.split()[2]):
                    sys.exit(f"{len(RUNNING)} episodes at once")
            if MODE.startswith("dies") and num_played == int(MODE.split()[1]):
                os._exit(3)
            if MODE == "sleeps" and num_played % 2:
                continue
            pool.submit(run, player, message)


def run(player, message):
    try:
        player.play(message)
    except Exception as error:
        send(type="result", episode=message["episode"], error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
