"""Answers, vectors and ranks of the classes for LangChain: whole, streamed, in batches and asynchronous."""

import asyncio
import json
import sys
from typing import Literal

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, SystemMessage
from pydantic import BaseModel

from metal_prefill.integrations import LangChainChat, LangChainEmbeddings, LangChainReranker

demo, embedding, reranker, *texts = sys.argv[1:]


class Reply(BaseModel):
    """A reply."""

    word: Literal["aye", "nay"]


chat = LangChainChat(model=demo, max_tokens=12, model_options={"device": "cpu"})
asked = [SystemMessage("Speak thou briefly."), HumanMessage("Who art thou?")]
prompts = [[HumanMessage(text)] for text in texts]
word = str(chat.invoke(asked).content)[4:8]
stopping = chat.model_copy(update={"options": {"stop": word}})


async def asynchronous() -> dict[str, object]:
    streamed = [chunk.content async for chunk in chat.astream(asked)]
    return {
        "answer": (await chat.ainvoke(asked)).content,
        "streamed": "".join(streamed),
        "batch": [answer.content for answer in await chat.abatch(prompts)],
        "documents": await vectors.aembed_documents(texts),
    }


cpu = {"device": "cpu"}
vectors = LangChainEmbeddings(model=embedding, query="query", options={"dimensions": 8}, model_options=cpu)
ranks = LangChainReranker(model=reranker, top_n=2, model_options={"device": "cpu"})
documents = [Document(text, metadata={"place": i}) for i, text in enumerate(texts)]
print(
    json.dumps(
        {
            "answer": chat.invoke(asked).content,
            "streamed": "".join(chunk.content for chunk in chat.stream(asked)),
            "stopped": chat.invoke(asked, stop=[" "]).content,
            "stopped_by_word": [
                stopping.invoke(asked).content,
                stopping.invoke(asked, stop="\n\n").content,
                chat.invoke(asked, stop=word).content,
            ],
            "stops": stopping._prepared(*stopping._arguments(asked, ["!"], {}))[1]["stop"],
            "tokens": chat.get_num_tokens(texts[0]),
            "batch": [answer.content for answer in chat.batch(prompts)],
            "typed": chat.with_structured_output(Reply).invoke("Aye or nay?").word,
            "schema": chat.with_structured_output(Reply.model_json_schema()).invoke("Aye or nay?"),
            "documents": vectors.embed_documents(texts),
            "query": vectors.embed_query(texts[0]),
            "ranked": [d.metadata for d in ranks.compress_documents(documents, texts[0])],
            "asynchronous": asyncio.run(asynchronous()),
        }
    )
)
