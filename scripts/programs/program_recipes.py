"""Which published programs run, and what is made smaller in each, so that a few steps take seconds.

None of their code is here: a recipe names a file of a checkout of keras-io's examples or Keras' guides, and the few
pieces of its text that are replaced. Everything else of a program runs as it is.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a published program is run.

    Attributes:
        path: Its file in the checkout.
        group: Its subject.
        edits: (old, new) for each piece of text that is replaced; each must occur.
        ends_before: Text before which the program ends: what follows it needs no training. Empty for its end.
        explained: Why a result differs from that of one process; empty if none may.
    """

    path: str
    group: str
    edits: tuple[tuple[str, str], ...] = ()
    ends_before: str = ""
    explained: str = ""

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.path.rpartition("/")[2].removesuffix(".py")


RECIPES = (
    Recipe("examples/keras_io/vision/mnist_convnet.py", "vision"),
    Recipe("examples/keras_io/vision/knowledge_distillation.py", "vision"),
    Recipe("examples/keras_io/nlp/bidirectional_lstm_imdb.py", "nlp"),
    Recipe("examples/keras_io/tensorflow/keras_recipes/antirectifier.py", "recipes"),
    Recipe("examples/demo_subclass.py", "guides"),
)
