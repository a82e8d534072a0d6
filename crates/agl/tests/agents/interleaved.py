"""A harness with a sub-agent that interleaves, and a history that is rewritten once. It speaks token ids, so that the test
knows every prompt to the token. Prints what it sent and got, for the test to compare with the rows."""

import json
import os
import urllib.request


def complete(prompt):
    body = {"model": "policy", "prompt": prompt, "max_tokens": 5}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        sampled = json.load(answer)["choices"][0]["token_ids"]
    calls.append({"prompt": prompt, "sampled": sampled})
    return sampled


calls = []
main_1 = [11, 12, 13]
a_1 = complete(main_1)
sub_1 = [21, 22]
b_1 = complete(sub_1)
main_2 = main_1 + a_1 + [14]
a_2 = complete(main_2)
sub_2 = sub_1 + b_1 + [23, 24]
b_2 = complete(sub_2)
# The harness compacts its history: the first answer is gone.
main_3 = main_1 + [15, 16]
a_3 = complete(main_3)
main_4 = main_3 + a_3 + [17]
complete(main_4)
print(json.dumps(calls))
