"""A recommender: what places do 300 films have on a map of taste, if all we know is who liked what?

    python examples/recommender.py
    python -m tfdist.run --workers 2 examples/recommender.py
    python -m tfdist.run --workers 2 --ps 2 examples/recommender.py    # through parameter servers

Shows a model with two inputs and two embedding tables, and a result that can be checked: no data set of real ratings
may be shipped, so the ratings here are made, and their truth is known. Every user and every film has a place on a
circle of tastes; a user likes a film by how near the two places are, and says so with noise. The model (a matrix
factorisation: one vector per user, one per film, and their scalar product) never sees the places. It learns vectors
that must form the circle again, and draws them into a picture, each film in the colour of its true place.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfdist

USERS, FILMS, RATINGS = 500, 300, 25_000
NOISE = 0.3  # standard deviation of a rating around the truth, whose own is 0.71


def main():
    parser = argparse.ArgumentParser(description="Recover a map of taste from ratings.")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the ratings (12)")
    parser.add_argument("--batch-size", type=int, default=250, help="ratings per step (250)")
    parser.add_argument("--picture", default="recommender.png", help="where the map is drawn (recommender.png)")
    options = parser.parse_args()

    keras.utils.set_random_seed(3)
    strategy = tfdist.create_strategy()  # before anything else of TensorFlow
    users, films, ratings, places = make_ratings()
    test = slice(0, RATINGS // 5)
    train = slice(RATINGS // 5, None)

    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=[keras.metrics.RootMeanSquaredError("error")])
    model.fit(
        {"user": users[train], "film": films[train]},
        ratings[train],
        batch_size=options.batch_size,
        epochs=options.epochs,
        verbose=2,
    )
    found = model.evaluate({"user": users[test], "film": films[test]}, ratings[test], batch_size=1000, verbose=0)
    if tfdist.is_chief():
        vectors = model.get_layer("film_vector").get_weights()[0]
        recovered, share = align(vectors, places)
        draw(recovered, places, options.picture)
        print(f"the films' places are recovered to {share:.1%}; their map is in {options.picture}")
        print(f"test error {found[1]:.3f} (the noise alone {NOISE:.3f})")


def make_ratings():
    """Returns (users, films, ratings, places of the films as angles), the same on every task."""
    random = np.random.default_rng(0)
    tastes, places = random.uniform(0, 2 * np.pi, USERS), random.uniform(0, 2 * np.pi, FILMS)
    users, films = random.integers(0, USERS, RATINGS), random.integers(0, FILMS, RATINGS)
    truth = np.cos(tastes[users] - places[films])
    ratings = truth + random.normal(0, NOISE, RATINGS)
    return users.astype("int32"), films.astype("int32"), ratings[:, np.newaxis].astype("float32"), places


def build_model():
    user, film = keras.Input((), dtype="int32", name="user"), keras.Input((), dtype="int32", name="film")
    start = keras.initializers.RandomNormal(stddev=0.3, seed=1)
    vectors = [
        keras.layers.Embedding(count, 2, embeddings_initializer=start, name=f"{name}_vector")(one)
        for name, count, one in (("user", USERS, user), ("film", FILMS, film))
    ]
    return keras.Model({"user": user, "film": film}, keras.layers.Dot(axes=1)(vectors))


def align(vectors, places):
    """Returns the vectors on the true map, and which share of the films' variance there they explain.

    A scalar product says nothing of how the map lies: it may be turned, mirrored, stretched. The best linear map of
    the vectors undoes that.
    """
    truth = np.stack([np.cos(places), np.sin(places)], axis=1)
    turn, *_ = np.linalg.lstsq(vectors, truth, rcond=None)
    recovered = vectors @ turn
    return recovered, 1 - np.sum((recovered - truth) ** 2) / np.sum((truth - truth.mean(axis=0)) ** 2)


def draw(points, places, path, size=640):
    """Draws each film where the model found it, in the colour of its true place, over the circle of tastes."""
    y, x = np.mgrid[0:size, 0:size]
    x, y = (2 * x / size - 1) * 1.4, (1 - 2 * y / size) * 1.4
    picture = np.full((size, size, 3), 1.0)
    picture[np.abs(np.hypot(x, y) - 1) < 0.006] = 0.8
    hues = np.stack([places / (2 * np.pi), np.full(FILMS, 0.85), np.full(FILMS, 0.85)], axis=1)
    colours = tf.image.hsv_to_rgb(hues).numpy()
    for point, colour in zip(points, colours, strict=True):
        picture[np.hypot(x - point[0], y - point[1]) < 0.03] = colour
    tf.io.write_file(path, tf.io.encode_png((255 * picture).astype("uint8")))


if __name__ == "__main__":
    main()
