"""Small transformers from their configurations, random weights, nothing downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "TransformerModel"]

VOCABULARY, LENGTH = 99, 7
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 48, "max_position_embeddings": 32}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION |= {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class TransformerModel:
    """How to build one model.

    Attributes:
        config: class of the configuration in `transformers`.
        model: class of the model.
        options: of the configuration.
        kind: ``text``, ``image``, ``encoder_decoder``, ``audio`` or ``image_text``.
        shrink: regular expressions of parameters of which at least one must lose rows: heads, feed-forward.
    """

    config: str
    model: str
    options: dict[str, Any]
    kind: str = "text"
    shrink: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The model, weights drawn wide enough that attention is far from uniform."""
        import transformers

        transformers.logging.set_verbosity_error()
        config = getattr(transformers, self.config)(**self.options)
        for part in (config, *(value for value in vars(config).values() if hasattr(value, "initializer_range"))):
            for name in ("initializer_range", "init_std"):
                if hasattr(part, name):
                    setattr(part, name, 0.2)
        model = getattr(transformers, self.model)(config)
        assert isinstance(model, nn.Module)
        return model

    def inputs(self, batch: int = 1) -> dict[str, Tensor]:
        """Keyword tensors."""
        ids = torch.randint(5, VOCABULARY, (batch, LENGTH))
        if self.kind == "text":
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.kind == "encoder_decoder":
            return {"input_ids": ids, "decoder_input_ids": torch.randint(5, VOCABULARY, (batch, LENGTH - 2))}
        if self.kind == "image":
            return {"pixel_values": torch.randn(batch, 3, 32, 32)}
        if self.kind == "image_text":
            return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32)}
        if self.kind == "speech":
            return {"input_features": torch.randn(batch, 16, 40), "decoder_input_ids": ids[:, :4]}
        if self.kind == "wave":
            return {"input_values": torch.randn(batch, 800)}
        raise ValueError(f"kind {self.kind!r} of {self.config}: no inputs known")


def _with(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    return base | more


_LLAMA_SHRINK = (r"self_attn\.q_proj\.weight", r"self_attn\.k_proj\.weight", r"mlp\.gate_proj\.weight")

MODELS: dict[str, TransformerModel] = {
    "hf_bert": TransformerModel(
        "BertConfig",
        "BertForSequenceClassification",
        TEXT,
        shrink=(r"attention\.self\.query\.weight", r"intermediate\.dense\.weight"),
    ),
    "hf_bert_eager": TransformerModel(
        "BertConfig",
        "BertForMaskedLM",
        _with(TEXT, attn_implementation="eager"),
        shrink=(r"attention\.self\.query\.weight", r"intermediate\.dense\.weight"),
    ),
    "hf_gpt2": TransformerModel(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        # Conv1D keeps inputs on axis 0: the rows of c_proj are the heads and the feed-forward channels.
        shrink=(r"attn\.c_proj\.weight", r"mlp\.c_proj\.weight"),
    ),
    "hf_llama": TransformerModel("LlamaConfig", "LlamaForCausalLM", GROUPED, shrink=_LLAMA_SHRINK),
    "hf_vit": TransformerModel(
        "ViTConfig",
        "ViTForImageClassification",
        VISION,
        "image",
        shrink=(r"(query|q_proj)\.weight", r"(intermediate\.dense|fc1)\.weight"),
    ),
    "hf_t5": TransformerModel(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "encoder_decoder",
        shrink=(r"SelfAttention\.q\.weight", r"EncDecAttention\.q\.weight", r"DenseReluDense\.wi\.weight"),
    ),
    "hf_mistral": TransformerModel("MistralConfig", "MistralForCausalLM", GROUPED, shrink=_LLAMA_SHRINK),
    "hf_qwen2": TransformerModel("Qwen2Config", "Qwen2ForCausalLM", GROUPED, shrink=_LLAMA_SHRINK),
    "hf_qwen3": TransformerModel("Qwen3Config", "Qwen3ForCausalLM", GROUPED, shrink=_LLAMA_SHRINK),
    "hf_gemma2": TransformerModel("Gemma2Config", "Gemma2ForCausalLM", GROUPED, shrink=_LLAMA_SHRINK),
    "hf_phi3": TransformerModel("Phi3Config", "Phi3ForCausalLM", _with(GROUPED, pad_token_id=0)),
    "hf_gpt_neox": TransformerModel("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT),
    "hf_opt": TransformerModel(
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
        shrink=(r"q_proj\.weight", r"fc1\.weight"),
    ),
    "hf_bloom": TransformerModel(
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "hf_albert": TransformerModel(
        "AlbertConfig",
        "AlbertForSequenceClassification",
        _with(TEXT, embedding_size=16),
        shrink=(r"query\.weight", r"ffn\.weight"),
    ),
    "hf_distilbert": TransformerModel(
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        shrink=(r"q_lin\.weight", r"lin1\.weight"),
    ),
    "hf_deberta_v2": TransformerModel(
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        _with(TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    ),
    "hf_bart": TransformerModel(
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 32,
        },
        "encoder_decoder",
        shrink=(r"q_proj\.weight", r"fc1\.weight"),
    ),
    "hf_whisper": TransformerModel(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        "speech",
        shrink=(r"q_proj\.weight", r"fc1\.weight"),
    ),
    "hf_wav2vec2": TransformerModel(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": (16, 16, 16),
            "conv_kernel": (10, 3, 2),
            "conv_stride": (5, 2, 2),
            "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 4,
        },
        "wave",
    ),
    "hf_clip": TransformerModel(
        "CLIPConfig",
        "CLIPModel",
        {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16},
        "image_text",
        shrink=(r"text_model.*q_proj\.weight", r"vision_model.*q_proj\.weight", r"fc1\.weight"),
    ),
    "hf_dinov2": TransformerModel("Dinov2Config", "Dinov2ForImageClassification", VISION, "image"),
    "hf_swin": TransformerModel(
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image",
        shrink=(r"(query|q_proj)\.weight", r"(intermediate\.dense|fc1)\.weight"),
    ),
    "hf_convnextv2": TransformerModel(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2]},
        "image",
    ),
    "hf_segformer": TransformerModel(
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
        "image",
    ),
    "hf_mobilevit": TransformerModel(
        "MobileViTConfig",
        "MobileViTForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [24, 32, 40],
            "neck_hidden_sizes": [8, 16, 16, 24, 24, 32, 48],
            "num_attention_heads": 4,
        },
        "image",
    ),
    "hf_mamba": TransformerModel(
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
}
