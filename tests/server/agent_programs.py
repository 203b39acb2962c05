"""Agents that others wrote, each as it is, one after the other (in .peers/agents).

Arguments: a program and the address of its session, by turns. Each line of the output is what became of one:
its answer, or how it failed. In one process, for the imports take longer than the agents.
"""

import asyncio
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.update(
    MSWEA_SILENT_STARTUP="1", LITELLM_LOCAL_MODEL_COST_MAP="True", OPENAI_AGENTS_DISABLE_TRACING="1"
)
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()
QUESTION = "What is 2 + 3?"


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def openai_agents(url, api="OpenAIChatCompletionsModel"):
    import agents
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
    model = getattr(agents, api)(model="any", openai_client=client)
    agent = agents.Agent(name="sums", instructions="Add.", tools=[agents.function_tool(add)], model=model)
    return asyncio.run(agents.Runner.run(agent, QUESTION)).final_output


def openai_agents_responses(url):
    return openai_agents(url, "OpenAIResponsesModel")


def pydantic_ai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="any"))
    return Agent(model, instructions="Add.", tools=[add]).run_sync(QUESTION).output


def mini_swe_agent(url):
    import minisweagent
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    settings = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "default.yaml").read_text())
    how = {"api_base": f"{url}/v1", "api_key": "any"}
    model = LitellmModel(model_name="openai/any", model_kwargs=how, cost_tracking="ignore_errors")
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **settings["agent"])
        agent.run(QUESTION)
        return (Path(folder) / "sum").read_text().strip()


def langgraph(url):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="any", base_url=f"{url}/v1", api_key="any"), tools=[add])
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content


def smolagents(url):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first.
            b: the second.
        """
        return a + b

    model = OpenAIServerModel(model_id="any", api_base=f"{url}/v1", api_key="any")
    return ToolCallingAgent(tools=[add], model=model, max_steps=3).run(QUESTION)


def claude_agent_sdk(url):
    """Its command line is a program of its own, with a Bash."""
    from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

    async def run():
        with tempfile.TemporaryDirectory() as home:
            env = {
                "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "any", "HOME": home,
                "CLAUDE_CONFIG_DIR": home, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            }  # fmt: skip
            how = ClaudeAgentOptions(
                tools=["Bash"], allowed_tools=["Bash"], cwd=home, env=env, setting_sources=[]
            )
            async for message in query(prompt=QUESTION, options=how):
                if isinstance(message, ResultMessage):
                    return message.result

    return asyncio.run(run())


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name, url in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    try:
        answer = str(globals()[name](url))
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), file=answers, flush=True)
