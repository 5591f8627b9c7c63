"""The models of the table, in its order."""

from evaluation.answers import image_models
from evaluation.answers import text_models
from evaluation.answers import wide_models

MODELS = {model.name: model for model in (*image_models.MODELS, *text_models.MODELS, *wide_models.MODELS)}
