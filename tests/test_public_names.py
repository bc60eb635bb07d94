"""Every public name says what it is, with an example; examples that need no TensorFlow are run."""

from __future__ import annotations

import ast
import doctest
import inspect
from importlib import import_module

import pytest

import tfdist

CALLABLE = [name for name in tfdist.__all__ if callable(getattr(tfdist, name)) and name != "TfdistError"]
LIGHT = ["tfdist.errors", "tfdist.cluster", "tfdist.tf_config", "tfdist.process", "tfdist.launch.report"]


@pytest.mark.parametrize("name", tfdist.__all__)
def test_a_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(tfdist, name))


@pytest.mark.parametrize("name", CALLABLE)
def test_what_can_be_called_has_an_example_that_names_it(name):
    _, found, example = inspect.getdoc(getattr(tfdist, name)).partition("Example:")
    assert found
    assert f"tfdist.{name}(" in example


@pytest.mark.parametrize("name", CALLABLE)
def test_an_example_is_python(name):
    example = inspect.getdoc(getattr(tfdist, name)).partition("Example:")[2]
    if ">>>" in example:
        source = "".join(part.source for part in doctest.DocTestParser().get_examples(example))
    else:
        source = inspect.cleandoc(example.partition("\n\n")[0])
    assert ast.parse(source).body


@pytest.mark.parametrize("name", LIGHT)
def test_examples_of_light_modules_print_what_they_say(name, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    module = import_module(name)
    result = doctest.testmod(module, extraglobs={"tfdist": tfdist})
    assert result.failed == 0
