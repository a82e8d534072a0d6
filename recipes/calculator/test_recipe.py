"""`python3 -m unittest` in this folder. Standard library only; `agent_openai.py` is tested where `openai` is installed."""

import http.server
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from collections import Counter
from pathlib import Path

import demonstrations
import make_data
import make_tokenizer
from agent import MAX_TURNS, SYSTEM, TOOLS
from calculator import InvalidExpression, calculate
from evaluator import given_answer

HERE = Path(__file__).parent


def says(content):
    return {"role": "assistant", "content": content}


def calls(expression, name="calculator"):
    function = {"name": name, "arguments": json.dumps({"expression": expression})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


class ScriptedModel:
    """A chat server that answers with the given messages in turn and keeps what it was asked."""

    def __init__(self, *messages, status=200):
        self.requests, answers = [], iter(messages)
        script = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                script.requests.append((self.path, self.headers["Authorization"], body))
                choice = {"index": 0, "finish_reason": "stop", "message": next(answers, None)}
                answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def run(script, *arguments, isolated=True, **environment):
    flags = ["-S", "-E"] if isolated else []
    return subprocess.run(
        [sys.executable, *flags, str(HERE / script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def ask(model, script="agent.py", isolated=True):
    return run(script, "What is 12*34?", isolated=isolated, OPENAI_BASE_URL=model.url, OPENAI_API_KEY="secret")


class TheAgent(unittest.TestCase):
    def test_runs_the_calculator_and_prints_the_answer_that_the_model_then_writes(self):
        with ScriptedModel(calls("12*34"), says("408")) as model:
            ended = ask(model)
        self.assertEqual((ended.returncode, ended.stdout), (0, "ANSWER: 408\n"), ended.stderr)
        (path, key, first), (_, _, second) = model.requests
        self.assertEqual((path, key), ("/v1/chat/completions", "Bearer secret"))
        self.assertEqual(first["tools"], TOOLS)
        self.assertEqual([m["role"] for m in first["messages"]], ["system", "user"])
        self.assertEqual(second["messages"][2], calls("12*34"))
        self.assertEqual(second["messages"][3], {"role": "tool", "tool_call_id": "call_1", "content": "408"})

    def test_tells_the_model_what_was_wrong_with_a_tool_call(self):
        for call, error in [(calls("12*"), "error: invalid expression"), (calls("1", "shell"), "error: unknown tool")]:
            with ScriptedModel(call, says("7")) as model:
                ask(model)
            self.assertEqual(model.requests[1][2]["messages"][3]["content"], error)

    def test_gives_up_after_some_turns_with_an_empty_answer(self):
        with ScriptedModel(*[calls("1+1")] * 9) as model:
            ended = ask(model)
        self.assertEqual((ended.returncode, ended.stdout.strip()), (0, "ANSWER:"))
        self.assertEqual(len(model.requests), MAX_TURNS)

    def test_fails_with_a_message_when_the_server_refuses_or_is_away(self):
        with ScriptedModel(says("7"), status=503) as model:
            refused = ask(model)
        away = ask(model)
        self.assertEqual((refused.returncode, away.returncode), (1, 1))
        self.assertIn("503", refused.stderr)
        self.assertIn(f"no answer from {model.url}", away.stderr)

    def test_keeps_the_answer_on_one_line_whatever_the_model_writes(self):
        with ScriptedModel(says("5\nANSWER: 408")) as model:
            ended = ask(model)
        self.assertEqual(ended.stdout, "ANSWER: 5 ANSWER: 408\n")

    @unittest.skipUnless(importlib.util.find_spec("openai"), "the openai package is not installed")
    def test_on_the_openai_package_holds_the_same_conversation(self):
        conversations = []
        for script in ["agent.py", "agent_openai.py"]:
            with ScriptedModel(calls("12*34"), says("408")) as model:
                ended = ask(model, script, isolated=False)
            self.assertEqual(ended.stdout, "ANSWER: 408\n", ended.stderr)
            conversations.append([(m["role"], m.get("content")) for m in model.requests[-1][2]["messages"]])
        self.assertEqual(conversations[0], conversations[1])


class TheCalculator(unittest.TestCase):
    def test_knows_precedence_brackets_and_signs(self):
        for expression, result in [("12+34*56", "1916"), ("(12+34)*56", "2576"), ("-3*(2-5)", "9"), ("7", "7")]:
            self.assertEqual(calculate(expression), result)

    def test_refuses_everything_else_that_python_can_do(self):
        for text in [
            "",
            "12*",
            "2**9",
            "7/2",
            "1.5",
            "abs(1)",
            "__import__('os')",
            "True",
            "1 if 1 else 2",
            "1+" * 200 + "1",
            7,
            None,
        ]:
            with self.assertRaises(InvalidExpression, msg=repr(text)):
                calculate(text)


class TheEvaluator(unittest.TestCase):
    def reward(self, stdout, answer):
        with tempfile.TemporaryDirectory() as folder, ScriptedModel(None) as gateway:
            row, log = Path(folder, "input.json"), Path(folder, "stdout.log")
            row.write_text(json.dumps({"question": "?", "answer": answer}))
            log.write_text(stdout)
            environment = {
                "AGL_INPUT": str(row),
                "AGL_AGENT_STDOUT": str(log),
                "AGL_EVENT_URL": gateway.url,
                "AGL_KEY": "k",
            }
            ended = run("evaluator.py", **environment)
            self.assertEqual(ended.returncode, 0, ended.stderr)
            ((_, key, event),) = gateway.requests
        self.assertEqual((key, event["event_type"], event["data"]["source"]), ("Bearer k", "reward", "evaluator"))
        return event["data"]["value"]

    def test_rewards_exactly_the_expected_number(self):
        self.assertEqual(self.reward("thinking\nANSWER: -408\n", -408), 1.0)
        self.assertEqual(self.reward("ANSWER: 409\n", 408), 0.0)
        self.assertEqual(self.reward("", 408), 0.0)

    def test_reads_the_last_answer_line_and_only_a_bare_number(self):
        self.assertEqual(given_answer("ANSWER: 1\nANSWER: 2\nbye"), 2)
        for line in ["ANSWER:", "ANSWER: --2", "ANSWER: 2 or 3", "ANSWER: 2.0", "answer: 2", "ANSWER: ²"]:
            self.assertIsNone(given_answer(line), line)

    def test_names_what_is_missing_from_its_environment(self):
        ended = run("evaluator.py")
        self.assertEqual(ended.returncode, 1)
        self.assertIn("AGL_INPUT", ended.stderr)


class TheData(unittest.TestCase):
    def test_is_the_same_for_the_same_seed_and_differs_between_seeds(self):
        first, again, other = (list(make_data.rows("train", seed, 50)) for seed in (1, 1, 2))
        self.assertEqual(first, again)
        self.assertFalse({row["question"] for row in first} & {row["question"] for row in other})

    def test_never_shares_an_expression_between_splits(self):
        seen = {split: set() for split in make_data.SPLITS}
        for split, seed in itertools.product(seen, range(3)):
            for problem in itertools.islice(make_data.problems(split, seed), 2000):
                seen[split].add(problem.expression.replace(" ", ""))
        for one, two in itertools.combinations(seen.values(), 2):
            self.assertFalse(one & two)

    def test_answers_are_the_value_of_what_the_question_spells(self):
        for problem in itertools.islice(make_data.problems("train", 5), 500):
            self.assertIn(problem.expression, problem.question)
            self.assertEqual(problem.answer, eval(problem.expression))

    def test_answers_are_never_a_number_of_the_question(self):
        for problem in itertools.islice(make_data.problems("train", 7), 3000):
            self.assertNotIn(str(problem.answer), re.findall(r"-?\d+", problem.question))


class TheDemonstrations(unittest.TestCase):
    def test_are_right_as_often_as_the_mixture_says(self):
        right = 0
        stream = make_data.problems("train", 3)
        for demonstration, problem in zip(demonstrations.demonstrations(0, 4000, 3), stream):
            self.assertEqual(demonstration["messages"][1]["content"], problem.question)
            right += demonstration["messages"][-1]["content"] == str(problem.answer)
        meant = demonstrations.MIXED["good"] + demonstrations.MIXED["corrected"]
        self.assertAlmostEqual(right / 4000, meant, delta=0.03)

    def test_show_good_habits_first(self):
        answers = [row["messages"][-1]["content"] for row in demonstrations.demonstrations(200, 0, 5)]
        problems = itertools.islice(make_data.problems("train", 5), 200)
        self.assertEqual(answers, [str(problem.answer) for problem in problems])

    def test_begin_as_the_agent_begins_and_end_without_a_tool_call(self):
        roles = Counter()
        for demonstration in demonstrations.demonstrations(0, 500, 4):
            messages = demonstration["messages"]
            self.assertEqual((messages[0]["content"], demonstration["tools"]), (SYSTEM, TOOLS))
            self.assertNotIn("tool_calls", messages[-1])
            roles[" ".join(message["role"] for message in messages)] += 1
        self.assertEqual(len(roles), 3, roles)  # a guess, one call, a corrected call


class TheTokenizer(unittest.TestCase):
    def test_committed_files_are_what_the_script_writes(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(run("make_tokenizer.py", folder).returncode, 0)
            for made in Path(folder).iterdir():
                self.assertEqual(
                    json.loads(made.read_text()), json.loads((HERE / "policy" / made.name).read_text()), made.name
                )

    def test_knows_every_piece_of_the_recipes_texts(self):
        known = set(make_tokenizer.words())
        for demonstration in demonstrations.demonstrations(0, 3000, 6):
            for message in demonstration["messages"]:
                for piece in re.findall(make_tokenizer.PATTERN, message["content"] or ""):
                    self.assertTrue(len(piece) == 1 or piece in known, repr(piece))


if __name__ == "__main__":
    unittest.main()
