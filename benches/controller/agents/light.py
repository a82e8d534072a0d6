"""An agent that calls its model once, with as little of the standard library as that takes."""

import http.client
import json
import os
from urllib.parse import urlsplit

url = urlsplit(os.environ["AGL_OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": os.environ["TAG"]}]})
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
connection.request("POST", url.path + "/chat/completions", body, headers)
json.load(connection.getresponse())["choices"][0]["message"]
