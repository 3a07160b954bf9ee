"""
A harness for tests, which plays the game of tasks/guess.py, or makes a mistake.

    python tests/harness.py MODE [NUM_EXAMPLES]

It follows the protocol of serving/harness.py, but does not import serving/. It renders the
conversation with the functions that a run uses for its tools, so both play the same game.
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
EPISODES = set()  # the numbers of the episodes in progress


def send(**message):
    with LOCK:
        if message["type"] == "result":
            EPISODES.discard(message["episode"])
        OUT.write(json.dumps(message) + "\n")
        OUT.flush()


def sample_turn(session, ids):
    """Samples a turn of the policy; returns its ids, log-probabilities and finish reason."""
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
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, choice["finish_reason"]


def break_result(result, number):
    """Makes the mistake of the mode in the result of an episode."""
    if MODE == "wrong result" and number % 2:
        result["own"] = result["own"][1:]
    if MODE.startswith("only"):
        successful_numbers = map(int, MODE.split()[1:])
        if number % 8 not in successful_numbers:
            return {"error": "this episode fails"}
    if MODE == "odd":
        result["metrics"] = {"": 1e15, "a b\nc": -3, "reward/mean": 2, "é" * 300: 0.5}
        result["messages"] = [{"role": "robot", "content": "\x1b[31m\ud800\0", "name": ""}] * 3
    if MODE == "bad reward" and number % 2:
        result["reward"] = "much"
    return result


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
        self.calls = calls
        self.template = chat_template
        self.game_class = Guess

    def play(self, message):
        """Plays the episode of a message, and sends its result."""
        number = message["episode"]
        session = f"session {number}"
        game = self.game_class()
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
        policy_positions = []
        logprobs = []
        messages = []
        try:
            for turn in range(MAX_TURNS):
                turn_ids, turn_logprobs, reason = sample_turn(session, ids)
                policy_positions += range(len(ids), len(ids) + len(turn_ids))
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
            "own": policy_positions,
            "logprobs": logprobs,
            "reward": game.get_reward(),
            "metrics": {"turns": float(len(messages))},
            "messages": messages,
        }
        send(type="result", episode=number, **break_result(result, number))

    def reply(self, game, call):
        """The reply of the game to a call."""
        if call.error:
            text = json.dumps({"error": call.error}, ensure_ascii=False)
        else:
            try:
                text = game.guess(**call.arguments)
            except Exception as error:
                text = json.dumps({"error": f"{type(error).__name__}: {error}"}, ensure_ascii=False)
        return {"role": "tool", "name": call.name or "tool", "content": text}


def make_rows():
    """The examples, with the mistake of the mode."""
    rows = [{"prompt": "I think of a number from 1 to 20. Find it."}] * NUM_EXAMPLES
    if MODE == "odd":
        odd_columns = {"answer": {"\ud800": [10**300]}, "name": "\ud800\n", "category": "x/y"}
        rows = [row | odd_columns for row in rows]
    if MODE.startswith("example"):
        rows[1] = json.loads(MODE.removeprefix("example"))
    return rows


def main():
    if MODE == "broken":
        raise RuntimeError("this harness is broken")
    if MODE == "silent":
        time.sleep(600)
    if MODE == "nonsense":
        print("hello", file=OUT, flush=True)
        time.sleep(600)

    rows = make_rows()
    if MODE == "no held-out":
        send(type="ready", train=rows, held_out=[])
    elif MODE.startswith("at once"):
        send(type="ready", train=rows, held_out=rows[:4], at_once=json.loads(MODE.split()[2]))
    else:
        send(type="ready", train=rows, held_out=rows[:4])
    if MODE == "flood":
        while True:
            send(type="result", episode=1, noise="x" * 1000)

    player = None
    pool = ThreadPoolExecutor(512)
    num_played = 0
    for line in sys.stdin:
        message = json.loads(line)
        if message["type"] == "policy":
            POLICY.update(message)
            player = Player()
        if message["type"] == "play":
            num_played += 1
            with LOCK:
                EPISODES.add(message["episode"])
                if MODE.startswith("at once") and len(EPISODES) > int(MODE.split()[2]):
                    sys.exit(f"{len(EPISODES)} episodes at once")
            if MODE.startswith("dies") and num_played == int(MODE.split()[1]):
                os._exit(3)
            if MODE == "sleeps" and num_played % 2:
                continue
            pool.submit(play_or_send_error, player, message)


def play_or_send_error(player, message):
    try:
        player.play(message)
    except Exception as error:
        send(type="result", episode=message["episode"], error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
