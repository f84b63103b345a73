"""What a report says of layers, and what it must not claim."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from rich.console import Console
from torch import nn

from compare.quantised_networks import images, network, quantised
from unsilent.compare.adapters.names import adapt
from unsilent.compare.layer_records import LayerComparison, LayerRow
from unsilent.compare.layer_report import layer_findings, layer_sections
from unsilent.compare.layers import compare_layers
from unsilent.render.report_terminal import print_table


def findings(original, deployed, batches=None):
    return list(layer_findings(compare_layers(original, deployed, batches or [images()])))


def changed(model, name, index=2):
    result = copy.deepcopy(model)
    with torch.no_grad():
        result.get_submodule(name).weight.view(-1)[index] += 0.5
    return result


def test_equal_networks_are_called_identical_in_what_was_compared():
    model = network()
    assert findings(model, copy.deepcopy(model)) == ["outputs of 9 layers are identical bit for bit in 1 batch"]


def test_the_first_layer_and_its_operation_are_said():
    model = network()
    (said,) = findings(model, changed(model, "5"))
    assert said == (
        "outputs first differ by more than the noise floor in layer 5: "
        "operation convolution has other results for the same inputs"
    )


def test_suspects_are_said_with_their_channel_and_their_absence_without_claiming_more():
    model = network()
    deployed = quantised(model, images(seed=3))
    clean = findings(model, deployed)
    assert clean[0].startswith(
        "of 4 convolution or linear layers and 1 layer whose parameters are vectors, none is a suspect"
    )
    with torch.no_grad():
        deployed[3].weight[1] += 3 * deployed[3].weight_scale[1]
    assert findings(model, deployed)[0].startswith("suspect: 3, output channel 1; a weight is ")


class Scale(nn.Module):
    """A layer with a weight of its own kind, which adapters leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight


def test_layers_that_an_adapter_left_alone_are_said():
    torch.manual_seed(0)
    model = nn.Sequential(Scale(), nn.ReLU(), Scale(), nn.Linear(8, 3)).eval()
    batch = torch.randn(5, 8)
    said = findings(model, adapt(model, "int8", [batch]), [batch])
    assert (
        "1 of 3 layers with weights are quantised, 15.4 % of the parameters; left in float32: 0 (Scale), 2 (Scale)"
        in said
    )


def test_layers_that_cannot_be_read_have_a_reason_and_no_table():
    model = network()
    result = compare_layers(model, torch.compile(model, backend="eager"), [images()])
    assert layer_sections(result) == ()
    assert "torch.compile" in next(layer_findings(result))


def test_missing_layers_and_other_shapes_are_said():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    other = nn.Sequential(copy.deepcopy(model[0]), nn.GLU()).eval()
    said = findings(model, other, [torch.randn(3, 4)])
    assert said[-2:] == [
        "not compared, as the deployed network does not run a layer of this path: 2",
        "not compared, as outputs have other shapes: 1",
    ]


@pytest.mark.parametrize("kind", ["same", "int8", "nan"])
def test_tables_are_printed_with_and_without_numbers(kind):
    model = network()
    deployed = quantised(model, images(seed=3)) if kind == "int8" else copy.deepcopy(model)
    if kind == "nan":
        with torch.no_grad():
            deployed[5].weight.fill_(float("nan"))
    (section,) = layer_sections(compare_layers(model, deployed, [images()]))
    stream = io.StringIO()
    for table in section.parts:
        print_table(table, Console(file=stream, width=140))
    text = stream.getvalue()
    assert "equal" in text
    assert "nan" not in text
    assert ("not finite" in text) == (kind == "nan")


class Negated(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


def test_a_difference_outside_of_the_layers_is_said():
    model = network()
    other = Negated(*copy.deepcopy(model)).eval()
    assert findings(model, other) == [
        "outputs of 9 layers are identical bit for bit in 1 batch",
        "the networks return different numbers although these layers agree: what differs is computed outside of them",
    ]


def test_what_only_the_deployed_network_has_or_calls_is_said():
    model = network()
    other = nn.Sequential(*copy.deepcopy(model), nn.Linear(10, 10)).eval()
    assert findings(model, other)[-1] == "not compared, as only the deployed network has a layer of this path: 9"
    again = copy.deepcopy(model)
    again[5] = nn.Sequential(again[5], again[6])
    assert findings(model, again)[-1] == "not compared, as only the deployed network calls these layers that often: 6#2"


def test_unrelated_weights_are_said_without_calling_no_layer_a_suspect():
    (said,) = findings(network(), network(7))
    assert said.startswith("of 4 convolution or linear layers, 4 differ so much from the")
    assert said.endswith("their weights are no rounded copy of the original's; so no suspect can be named")


def test_what_could_not_be_compared_or_run_again_is_said_with_its_reason():
    row = LayerRow("a", "Linear")
    row.accumulated.add(torch.ones(2), torch.ones(2))
    result = LayerComparison((row,), problems={"b": "no"}, floor_problems={"two halves": "odd"}, batches=1)
    assert list(layer_findings(result))[1:] == [
        "not compared: b (no)",
        "the noise floor leaves out what could not be run: two halves (odd)",
    ]


def test_layers_of_the_original_that_have_no_counterpart_are_said_where_none_has():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    other = nn.ModuleDict({"a": nn.Linear(4, 4)})
    other.forward = lambda x: other["a"](x)
    assert "'0'" in findings(model, other.eval(), [torch.randn(2, 4)])[0]
