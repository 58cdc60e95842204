"""Random models: what the specification says of their weights, and tokenizers that give every text back."""

from __future__ import annotations

import pytest
import torch
import transformers

from agro.config import NewModel, PolicyConfig
from agro.errors import Refused
from agro.models.newmodel import new_model
from agro.models.policy import Policy

EVERYTHING = "".join(map(chr, range(0x250))) + " é😀\u200d中文\n\t  end "
TEXTS = ["", " ", "  a  b ", "\n\n", "<eos>", "<bos> <pad><unk>", EVERYTHING, "ab" * 3000]


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_weights_have_the_standard_deviation_that_is_asked_for(std):
    spec = NewModel(alphabet="abc", hidden=64, layers=2, heads=2, context=16, initializer_range=std)
    model = Policy.load(PolicyConfig(new=spec, device="cpu")).model
    for weight in (model.model.layers[1].mlp.up_proj.weight, model.model.layers[0].self_attn.q_proj.weight):
        # 4096 or more normal numbers: their standard deviation is known to 1.1 %.
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("alphabet", ["bytes", EVERYTHING])
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_a_text_back(tmp_path, alphabet, text):
    alphabet = alphabet if alphabet == "bytes" else "".join(dict.fromkeys(alphabet))
    new_model(tmp_path, NewModel(alphabet=alphabet, hidden=8, layers=1, heads=1, context=16), 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == (len(text.encode()) if alphabet == "bytes" else len(text))
    assert not set(ids) & {0, 1, 2, 3}
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer(text)["input_ids"] == [1, *ids]


def test_a_character_outside_the_alphabet_is_unknown(tmp_path):
    new_model(tmp_path, NewModel(alphabet="ab", hidden=8, layers=1, heads=1, context=16), 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("axxb")["input_ids"] == [1, 4, 3, 3, 5]
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<unk>"]) == [0, 1, 2, 3]


def test_the_same_seed_writes_the_same_bytes_and_leaves_the_generator_alone(tmp_path):
    spec = NewModel(alphabet="ab", hidden=8, layers=2, heads=2, context=16)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        new_model(tmp_path / name, spec, seed)
        torch.rand(5)
    files = {n: {f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in "abc"}
    assert files["a"] == files["b"]
    assert files["a"]["model.safetensors"] != files["c"]["model.safetensors"]
    torch.random.set_rng_state(before)
    new_model(tmp_path / "d", spec, 3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_model_is_a_llama_with_tied_embeddings(tmp_path):
    new_model(tmp_path, NewModel(alphabet="ab", hidden=48, layers=3, heads=4, context=20), 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (len(model.model.layers), model.config.max_position_embeddings, model.config.vocab_size) == (
        3,
        20,
        6,
    )
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"heads": 3},
            "expected heads that divide hidden into parts of an even size, got hidden = 8, heads = 3",
        ),
        ({"heads": 8}, "parts of an even size"),
        ({"alphabet": "aba"}, "expected different characters, or 'bytes'; repeated: 'a'"),
        ({"alphabet": ""}, "expected different characters"),
    ],
)
def test_a_specification_that_makes_no_model_is_refused(tmp_path, changes, message):
    with pytest.raises(Refused, match=message):
        new_model(tmp_path, NewModel(**{"alphabet": "ab", "hidden": 8, "layers": 1, "heads": 1} | changes), 0)
