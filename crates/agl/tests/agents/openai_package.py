"""An agent on the `openai` package. It reads nothing but what that package reads by itself."""

import sys

from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    completion = client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=8)
    messages.append(completion.choices[0].message)
    messages.append({"role": "user", "content": "go on"})
print(completion.choices[0].message.content)
