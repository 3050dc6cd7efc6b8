"""Texts, answers, vectors and ranks of the classes for LlamaIndex: whole, streamed and asynchronous."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode

from metal_prefill.integrations import LlamaIndexEmbeddings, LlamaIndexLLM, LlamaIndexReranker

demo, embedding, reranker, *texts = sys.argv[1:]
cpu = {"device": "cpu"}
model = LlamaIndexLLM(model=demo, max_tokens=12, model_options=cpu)
asked = [ChatMessage(role="system", content="Speak thou briefly."), ChatMessage(content="Who art thou?")]
vectors = LlamaIndexEmbeddings(model=embedding, query="query", options={"dimensions": 8}, model_options=cpu)
ranks = LlamaIndexReranker(model=reranker, top_n=2, model_options=cpu)


async def asynchronous() -> dict[str, object]:
    streamed = [part async for part in await model.astream_chat(asked)]
    completed = [part async for part in await model.astream_complete("ROMEO:")]
    both = await asyncio.gather(*(model.acomplete(text) for text in texts))
    return {
        "answer": (await model.achat(asked)).message.content,
        "streamed": [streamed[-1].message.content, "".join(part.delta for part in streamed)],
        "completed": [completed[-1].text, "".join(part.delta for part in completed)],
        "batch": [one.text for one in both],
        "documents": await vectors.aget_text_embedding_batch(texts),
        "query": await vectors.aget_query_embedding(texts[0]),
    }


streamed = list(model.stream_chat(asked))
completed = list(model.stream_complete("ROMEO:"))
nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(texts)]
print(
    json.dumps(
        {
            "window": model.metadata.context_window,
            "answer": model.chat(asked).message.content,
            "streamed": [streamed[-1].message.content, "".join(part.delta for part in streamed)],
            "text": model.complete("ROMEO:").text,
            "completed": [completed[-1].text, "".join(part.delta for part in completed)],
            "batch": [model.complete(text).text for text in texts],
            "documents": vectors.get_text_embedding_batch(texts),
            "query": vectors.get_query_embedding(texts[0]),
            "ranked": [[n.node_id, n.score] for n in ranks.postprocess_nodes(nodes, query_str=texts[0])],
            "asynchronous": asyncio.run(asynchronous()),
        }
    )
)
