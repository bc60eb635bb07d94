"""Text classification: which part of Python's standard library does this docstring belong to?

    python examples/text.py
    python -m tfdist.run --workers 2 examples/text.py

Shows strings in a `tfdist.data` pipeline, a `TextVectorization` that every task adapts to the same texts (so that the
tasks need not exchange a vocabulary), its work split over the tasks by `map`, and an `Embedding`, whose gradients are
sparse: tasks exchange only the rows of words that occurred.

The corpus needs no download: it is the documentation inside the Python that runs this, (c) Python Software Foundation,
under the PSF License Agreement (https://docs.python.org/3/license.html). About 3,000 docstrings of three families of
modules are read from their source files, and every fifth is kept for the test. Another version of Python has somewhat
other docstrings, and so other numbers.
"""

import argparse
import ast
import sysconfig
from pathlib import Path

import keras
import numpy as np

import tfdist

FAMILIES = {
    "side by side": "asyncio concurrent multiprocessing queue selectors subprocess threading",
    "internet": "email ftplib http imaplib ipaddress mailbox smtplib socket socketserver ssl urllib wsgiref xmlrpc",
    "Python itself": "ast bdb cmd code codeop dis doctest importlib inspect pdb pydoc traceback typing unittest",
}


def main():
    parser = argparse.ArgumentParser(description="Tell docstrings of the standard library by their words.")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the texts (4)")
    parser.add_argument("--batch-size", type=int, default=64, help="texts per step, over all workers (64)")
    options = parser.parse_args()

    keras.utils.set_random_seed(5)
    strategy = tfdist.create_strategy()  # before anything else of TensorFlow
    texts, labels = load_docstrings()
    is_test = np.arange(len(texts)) % 5 == 0

    vectorize = keras.layers.TextVectorization(max_tokens=4000, output_sequence_length=60)
    vectorize.adapt(texts[~is_test])

    def pipeline(chosen, shuffle):
        source = (texts[chosen], labels[chosen])
        rows = tfdist.data.from_arrays(source, options.batch_size, shuffle=shuffle, seed=5)
        return rows.map(lambda text, label: (vectorize(text), label))

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((60,), dtype="int64"),
                keras.layers.Embedding(4000, 32, mask_zero=True),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(len(FAMILIES), activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(2e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(pipeline(~is_test, shuffle=True), epochs=options.epochs, verbose=2)

    _, accuracy = model.evaluate(pipeline(is_test, shuffle=False), verbose=0)  # on all tasks
    if tfdist.is_chief():
        print(f"{len(texts):,} docstrings; test accuracy {accuracy:.4f}")


def load_docstrings():
    """Returns texts and the numbers of their families, the same on every task with the same Python."""
    library = Path(sysconfig.get_path("stdlib"))
    found = {}  # a text that comes again is counted once
    for label, modules in enumerate(FAMILIES.values()):
        for module in modules.split():
            for file in sorted((library / module).rglob("*.py")) or [library / f"{module}.py"]:
                for node in ast.walk(ast.parse(file.read_bytes())):
                    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                        text = ast.get_docstring(node)
                        if text:
                            found.setdefault(text, label)
    return np.array(list(found), object), np.array(list(found.values()), "int32")


if __name__ == "__main__":
    main()
