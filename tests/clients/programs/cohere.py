"""Ranks of documents by the client's second version."""

import json
import sys

import cohere

url, query, *documents = sys.argv[1:]
client = cohere.ClientV2(api_key="none", base_url=url)
answer = client.rerank(model="ranks", query=query, documents=documents, top_n=2)
print(json.dumps([[one.index, one.relevance_score] for one in answer.results]))
