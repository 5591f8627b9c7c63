"""Models for text and speech: architectures of keras-hub with the sizes of its presets, and recurrent ones."""

import functools

import keras
from keras import layers

from evaluation.answers.trained_model import of_fixed_shapes
from evaluation.answers.trained_model import TrainedModel

_HUB = "with the sizes of keras-hub's preset"


def _bert(depth, heads, width, length):
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30522, num_layers=depth, num_heads=heads, hidden_dim=width, intermediate_dim=4 * width)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2)
    return of_fixed_shapes(model, token_ids=(length,), segment_ids=(length,), padding_mask=(length,))


def _distil_bert():
    import keras_hub

    backbone = keras_hub.models.DistilBertBackbone(
        vocabulary_size=30522, num_layers=6, num_heads=12, hidden_dim=768, intermediate_dim=3072)
    model = keras_hub.models.DistilBertTextClassifier(backbone, num_classes=2)
    return of_fixed_shapes(model, token_ids=(128,), padding_mask=(128,))


def _roberta_masked(vocabulary, name):
    """Returns a model that predicts 76 of 512 words, 15 %."""
    import keras_hub

    backbone = getattr(keras_hub.models, f"{name}Backbone")(
        vocabulary_size=vocabulary, num_layers=12, num_heads=12, hidden_dim=768, intermediate_dim=3072,
        max_sequence_length=514)
    model = getattr(keras_hub.models, f"{name}MaskedLM")(backbone)
    return of_fixed_shapes(model, token_ids=(512,), padding_mask=(512,), mask_positions=(76,))


def _gpt2(depth, heads, width):
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=50257, num_layers=depth, num_heads=heads, hidden_dim=width, intermediate_dim=4 * width,
        max_sequence_length=1024)
    return of_fixed_shapes(keras_hub.models.GPT2CausalLM(backbone), token_ids=(1024,), padding_mask=(1024,))


def _llama():
    import keras_hub

    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=128256, num_layers=16, num_query_heads=32, num_key_value_heads=8, hidden_dim=2048,
        intermediate_dim=8192, tie_word_embeddings=True)
    return of_fixed_shapes(keras_hub.models.Llama3CausalLM(backbone), token_ids=(2048,), padding_mask=(2048,))


def _t5():
    import keras_hub

    backbone = keras_hub.models.T5Backbone(
        vocabulary_size=32128, num_layers=6, num_heads=8, hidden_dim=512, intermediate_dim=2048)
    names = {tensor.name: (512,) if "encoder" in tensor.name else (128,)
             for tensor in keras.tree.flatten(backbone.input)}
    model = of_fixed_shapes(backbone, **names)
    states = model.output["decoder_sequence_output"]
    return keras.Model(model.input, backbone.token_embedding(states, reverse=True))


def _lstm_language_model():
    """Returns the medium model of W. Zaremba et al., 2014, for the Penn Treebank."""
    words = keras.Input((35,), dtype="int32")
    x = layers.Embedding(10_000, 650)(words)
    for _ in range(2):
        x = layers.LSTM(650, return_sequences=True)(layers.Dropout(0.5)(x))
    return keras.Model(words, layers.Dense(10_000, "softmax")(layers.Dropout(0.5)(x)))


def _speech():
    """Returns a network like Deep Speech 2: convolutions and recurrent layers over 10 s of a spectrogram."""
    x = inputs = keras.Input((1000, 161, 1))
    for kernel, strides in (((11, 41), (2, 2)), ((11, 21), (1, 2))):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(32, kernel, strides, "same", use_bias=False)(x)))
    x = layers.Reshape((500, -1))(x)
    for _ in range(3):
        x = layers.Bidirectional(layers.GRU(800, return_sequences=True))(x)
    x = layers.Dense(1600, "relu")(x)
    return keras.Model(inputs, layers.Dense(29, "softmax")(x))


MODELS = (
    TrainedModel("BERT-base classifier", "text", 32, functools.partial(_bert, 12, 12, 768, 128),
                 f"J. Devlin et al., NAACL 2019, {_HUB} bert_base_en; 128 words"),
    TrainedModel("BERT-large classifier", "text", 8, functools.partial(_bert, 24, 16, 1024, 384),
                 "J. Devlin et al., NAACL 2019; 384 words"),
    TrainedModel("DistilBERT classifier", "text", 32, _distil_bert,
                 f"V. Sanh et al., 2019, {_HUB} distil_bert_base_en; 128 words"),
    TrainedModel("RoBERTa-base masked words", "text", 16, functools.partial(_roberta_masked, 50265, "Roberta"),
                 f"Y. Liu et al., 2019, {_HUB} roberta_base_en; 512 words"),
    TrainedModel("XLM-RoBERTa-base masked words", "text", 16,
                 functools.partial(_roberta_masked, 250002, "XLMRoberta"),
                 f"A. Conneau et al., ACL 2020, {_HUB} xlm_roberta_base_multi; 512 words"),
    TrainedModel("GPT-2", "text", 8, functools.partial(_gpt2, 12, 12, 768),
                 f"A. Radford et al., 2019, {_HUB} gpt2_base_en; 1,024 words"),
    TrainedModel("GPT-2 medium", "text", 4, functools.partial(_gpt2, 24, 16, 1024),
                 f"A. Radford et al., 2019, {_HUB} gpt2_medium_en; 1,024 words"),
    TrainedModel("Llama 3.2 1B", "text", 1, _llama, f"{_HUB} llama3.2_1b; 2,048 words"),
    TrainedModel("T5-small", "text", 32, _t5, f"C. Raffel et al., JMLR 2020, {_HUB} t5_small_multi; 512 to 128 words"),
    TrainedModel("LSTM language model", "text", 64, _lstm_language_model, "W. Zaremba et al., 2014, the medium one"),
    TrainedModel("Deep Speech 2", "speech", 16, _speech, "D. Amodei et al., ICML 2016, with 3 recurrent layers"),
)
