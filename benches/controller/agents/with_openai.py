"""An agent on the `openai` package that calls its model once, and says when it began and when it had its imports."""

import time

first_line = time.time_ns()

import os

from openai import OpenAI

imported = time.time_ns()
client = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"])
messages = [{"role": "user", "content": os.environ["TAG"]}]
client.chat.completions.create(model="policy", messages=messages).choices[0].message
with open("times", "w") as file:
    print(first_line, imported, file=file)
