"""truncation "auto": the oldest turns are left out until the prompt fits."""

from __future__ import annotations

from llmkit_server.chat_prompt import chat_prompt
from llmkit_server.context import ServerContext
from llmkit_server.protocol.chat import ChatRequest
from llmkit_server.tool_use import tool_use


async def fitted(server: ServerContext, chat: ChatRequest) -> ChatRequest:
    """`chat` with as few of the oldest turns left out as must be; what the system says stays. A turn begins with what
    the user says, so that no result of a tool loses its call. Room is left for the answer: max_output_tokens, at most
    half of the context. If not even the last turn fits, it stands alone, and the engine says so.
    """
    limit = server.llm.limits.max_model_len
    asked = chat.max_completion_tokens
    room = limit - (min(asked, limit // 2) if type(asked) is int and asked > 0 else 1)
    messages = chat.messages
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    cuts = [start, *(i for i in range(start + 1, len(messages)) if messages[i]["role"] == "user")]
    tools = tool_use(server, chat).tools

    def without(cut: int) -> ChatRequest:
        return chat.model_copy(update={"messages": [*messages[:start], *messages[cut:]]})

    async def fits(cut: int) -> bool:
        prompt = await chat_prompt(server, without(cut), tools)
        return len(await server.text_threads.run(server.tokenizer.encode, prompt, add_special_tokens=False)) <= room

    if await fits(start):
        return chat
    low, high = 1, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return without(cuts[min(low, len(cuts) - 1)])
