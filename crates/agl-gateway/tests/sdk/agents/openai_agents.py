"""`openai-agents`, which speaks Responses: `openai_agents.py [stream]`."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

import task


async def main():
    set_tracing_disabled(True)
    agent = Agent(name="multiplier", instructions=task.SYSTEM, model="gpt-4o", tools=[function_tool(task.multiply)])
    if "stream" in sys.argv:
        result = Runner.run_streamed(agent, task.QUESTION)
        async for _event in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task.QUESTION)
    task.answer(result.final_output)


asyncio.run(main())
