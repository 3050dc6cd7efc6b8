"""The transformer as scikit-learn uses it: tags, names of columns, data frames."""

from pathlib import Path

import numpy as np
import pytest

from metal_prefill import Model, synth

TEXTS = ["To be", "or not to be"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    return synth.synthesize(tmp_path_factory.mktemp("m") / "small.gguf", preset="tiny-embedding")


@pytest.mark.parametrize(("dimensions", "width"), [(None, 64), (8, 8)])
def test_columns_have_names(path: Path, dimensions: int | None, width: int) -> None:
    from metal_prefill.integrations import EmbeddingTransformer

    transformer = EmbeddingTransformer(
        path, dimensions=dimensions, model_options={"device": "cpu", "threads": 1}
    )
    names = transformer.fit(TEXTS).get_feature_names_out()
    assert names.tolist() == [f"embeddingtransformer{i}" for i in range(width)]
    assert transformer.transform(TEXTS).shape == (2, width)


def test_the_output_may_be_a_data_frame(path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    from metal_prefill.integrations import EmbeddingTransformer

    transformer = EmbeddingTransformer(path, model_options={"device": "cpu"}).set_output(transform="pandas")
    found = transformer.fit_transform(pandas.Series(TEXTS, index=[7, 9]))
    assert found.index.tolist() == [7, 9]
    assert found.columns.tolist() == transformer.get_feature_names_out().tolist()
    with Model(path, device="cpu") as model:
        np.testing.assert_array_equal(found.to_numpy(), model.embed(TEXTS))


def test_tags_declare_text_input_and_no_fitting(path: Path) -> None:
    utils = pytest.importorskip("sklearn.utils")
    if not hasattr(utils, "get_tags"):
        pytest.skip("scikit-learn before 1.6 has no get_tags")
    from metal_prefill.integrations import EmbeddingTransformer

    tags = utils.get_tags(EmbeddingTransformer(path))
    assert (tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array) == (
        True,
        True,
        False,
    )
    assert not tags.requires_fit


@pytest.mark.filterwarnings("ignore:1 of 2 texts did not fit")
def test_texts_are_truncated_and_normalized_as_by_the_model(path: Path) -> None:
    pytest.importorskip("sklearn")
    from metal_prefill.integrations import EmbeddingTransformer

    texts, options = ["to be " * 600, "to be"], {"device": "cpu", "threads": 1}
    transformer = EmbeddingTransformer(path, truncate="end", unicode="NFC", model_options=options)
    with Model(path, device="cpu", threads=1) as model:
        expected = model.embed(texts, truncate="end", unicode="NFC")
    np.testing.assert_array_equal(transformer.fit_transform(texts), expected)
    with pytest.raises(ValueError, match="context"):
        EmbeddingTransformer(path, model_options=options).transform(texts)
    with pytest.raises(ValueError, match="unicode"):
        EmbeddingTransformer(path, unicode="NFX", model_options=options).transform(texts[1:])
