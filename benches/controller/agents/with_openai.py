"""An agent on the `openai` package that calls its model once, and says when it began and when it had its imports.

`with_openai.py shared` gives its client the certificates of `tls.py`.
"""

import time

first_line = time.time_ns()

import os
import sys

from openai import DefaultHttpxClient, OpenAI

http_client = None
if sys.argv[1:] == ["shared"]:
    import tls

    http_client = DefaultHttpxClient(verify=tls.CONTEXT)
imported = time.time_ns()
client = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], http_client=http_client)
messages = [{"role": "user", "content": os.environ["TAG"]}]
client.chat.completions.create(model="policy", messages=messages).choices[0].message
with open("times", "w") as file:
    print(first_line, imported, file=file)
