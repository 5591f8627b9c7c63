"""The speeds of accelerators, for clusters whose computing is emulated or simulated.

A layer takes its share of a step by its additions and multiplications. If the rate of a model is known, it
gives the time of a step; otherwise the rate of arithmetic does that other models have reached.
"""

import dataclasses

from evaluation.workloads import zoo
from tf_poseidon import planning


@dataclasses.dataclass(frozen=True)
class Profile:
    """How fast an accelerator trains.

    Attributes:
        name: Its common name.
        gflops: Its rate of arithmetic in models without a rate, and in the products that rebuild gradients
            from factors, in 10^9 additions and multiplications per second.
        images_per_s: Rows of the batch per second, by model, when a single one trains alone.
        source: Where the numbers come from.
    """

    name: str
    gflops: float
    images_per_s: dict[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""

    def step_seconds(self, model, batch_size):
        """Returns how long a step takes without other ranks."""
        if model in self.images_per_s:
            return batch_size / self.images_per_s[model]
        return batch_size * zoo.operations(model) / (self.gflops * 1e9)

    def operation_seconds(self, model):
        """Returns how long one addition or multiplication of a model takes, on average."""
        return self.step_seconds(model, 1) / zoo.operations(model)


PROFILES = {profile.name: profile for profile in (
    Profile("titan_x", 4500, {"googlenet": 257, "vgg19": 35.5, "vgg19_22k": 34.6},
            "H. Zhang et al., USENIX ATC 2017, one node with Caffe; gflops are what VGG19 needs at "
            "TensorFlow's rate"),
    Profile("titan_x_tf", 4500, {"inception_v3": 43.2, "vgg19": 38.5, "vgg19_22k": 34.8,
                                  "resnet50": 64.6, "resnet152": 21.9},
            "the same, one node with TensorFlow; ResNets at the arithmetic rate of Inception-V3"),
    Profile("a100", 55_000, {"resnet50": 2400},
            "ResNet-50 in mixed precision on one A100, as its vendor's examples reach it, and its rate"),
    *(Profile(name, planning.ACCELERATORS[name]["gflops"], source="docs/planning.md#accelerators")
      for name in ("v100", "h100")),
)}
