"""The evaluator of a control experiment: training rewards are permuted among rollouts, so there is nothing to learn from.

Each training rollout puts its true reward into a pool that all share, and draws one out of it at random. The rewards keep their
distribution and lose their rollouts. Validation rollouts get their true reward.

    permuted_evaluator.py POOL IS_TRAIN      (POOL is a file; IS_TRAIN is `true` or `false`)
"""

import fcntl
import json
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from evaluator import given_answer  # noqa: E402
from http_json import post_json  # noqa: E402

POOL_SIZE = 64  # until the pool is full, rewards are drawn at about the starting policy's rate
STARTING_RATE = 0.4


def permuted(path, reward):
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        pool = json.loads(file.read() or "[]")
        pool += [float(random.random() < STARTING_RATE) for _ in range(POOL_SIZE - len(pool))]
        pool.append(reward)
        drawn = pool.pop(random.randrange(len(pool)))
        file.seek(0)
        file.truncate()
        file.write(json.dumps(pool))
    return drawn


def main():
    pool, is_train = sys.argv[1], sys.argv[2].lower() == "true"
    with open(os.environ["AGL_INPUT"]) as file:
        expected = json.load(file)["answer"]
    with open(os.environ["AGL_AGENT_STDOUT"], errors="replace") as file:
        reward = 1.0 if given_answer(file.read()) == expected else 0.0
    value = permuted(pool, reward) if is_train else reward
    event = {"event_type": "reward", "data": {"value": value, "source": "evaluator"}}
    post_json(os.environ["AGL_EVENT_URL"], os.environ["AGL_KEY"], event)


if __name__ == "__main__":
    main()
