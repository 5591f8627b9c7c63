"""Training steps for one process: small versions of published programs.

Each program is a function that returns (step, variables, batches). The step uses plain SGD, so that a gradient of a
wrong length shows. Batches have 7, 12, 1 and 2 rows: uneven parts, and ranks without rows.
"""

import keras
import numpy as np
import tensorflow as tf
import training_steps

SIZES = (7, 12, 1, 2)
PROGRAMS = {}
_RATE = 0.1


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def _rng(seed=0):
    return np.random.default_rng(seed)


def _variable(name, *shape, seed=0):
    return tf.Variable(_rng(len(name) + 7 * seed).normal(size=shape) / 2, name=name)


def _batches(*columns, sizes=SIZES, seed=3):
    """Batches made by functions of (rng, rows)."""
    rng = _rng(seed)
    return [tuple(column(rng, size) for column in columns) for size in sizes]


def _x(rng, rows):
    return rng.normal(size=(rows, 4))


def _y(rng, rows):
    return rng.normal(size=(rows, 3))


def _labels(rng, rows):
    return rng.integers(0, 3, rows)


def _net(seed=0):
    """Two dense layers, and their variables."""
    w, b, v = _variable("w", 4, 6, seed=seed), _variable("b", 6, seed=seed), _variable("v", 6, 3, seed=seed)
    return (lambda x: tf.nn.tanh(x @ w + b) @ v), [w, b, v]


def _sgd(tape, loss, variables):
    for variable, gradient in zip(variables, tape.gradient(loss, variables)):
        variable.assign_sub(_RATE * gradient)


def _supervised(loss_of, batches=None, of_gradients=None):
    """A step that minimizes loss_of(outputs, y)."""
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(net(x), y)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, of_gradients(gradients) if of_gradients else gradients):
            variable.assign_sub(_RATE * gradient)
        return loss

    return step, variables, batches or _batches(_x, _y)


# ---- losses -------------------------------------------------------------------------------------


@program
def mean_of_squares():
    return _supervised(lambda p, y: tf.reduce_mean((p - y)**2))


@program
def loss_for_each_row():
    """`tape.gradient` of a vector is that of its sum."""
    return _supervised(keras.losses.MeanSquaredError(reduction=None))


@program
def dice():
    return _supervised(keras.losses.Dice(reduction=None, axis=(0, 1)), _batches(
        _x, lambda rng, k: rng.integers(0, 2, (k, 3)).astype("float64")))


@program
def tversky():
    return _supervised(lambda p, y: keras.losses.Tversky(axis=(0, 1))(y, tf.sigmoid(p)), _batches(
        _x, lambda rng, k: rng.integers(0, 2, (k, 3)).astype("float64")))


@program
def masked_mean():
    """Sum of what counts, over how much counts."""
    def loss(p, y):
        mask = tf.cast(y > 0, tf.float64)
        return tf.reduce_sum(mask * (p - y)**2) / tf.reduce_sum(mask)
    return _supervised(loss, _batches(_x, lambda rng, k: np.abs(rng.normal(size=(k, 3))) + .1 - rng.integers(0, 2)))


@program
def mean_of_present():
    """A mean over the rows that a mask picks."""
    def loss(p, y):
        return tf.reduce_mean(tf.boolean_mask((p - y)**2, y[:, 0] > -2))
    return _supervised(loss)


@program
def root_of_mean():
    """Not linear in the sum over rows."""
    return _supervised(lambda p, y: tf.sqrt(tf.reduce_mean((p - y)**2)))


@program
def sum_by_tensordot():
    return _supervised(lambda p, y: tf.tensordot(tf.reshape(p - y, [-1]), tf.reshape(p - y, [-1]), 1))


@program
def sum_plus_mean():
    return _supervised(lambda p, y: tf.reduce_sum(p**2) / 10 + tf.reduce_mean((p - y)**2))


@program
def regularized():
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y)**2) + .1 * tf.add_n([tf.nn.l2_loss(v) for v in variables])
        _sgd(tape, loss, variables)
        return loss

    return step, variables, _batches(_x, _y)


@program
def correlation():
    """One minus the correlation over the batch."""
    def loss(p, y):
        p, y = p - tf.reduce_mean(p, 0), y - tf.reduce_mean(y, 0)
        norms = tf.sqrt(tf.reduce_sum(p**2) * tf.reduce_sum(y**2) + 1e-3)
        return 1 - tf.reduce_sum(p * y) / norms
    return _supervised(loss)


@program
def largest_of_batch():
    """Trains only on the hardest row."""
    return _supervised(lambda p, y: tf.reduce_max(tf.reduce_sum((p - y)**2, 1)))


# ---- pairs of rows ------------------------------------------------------------------------------


def _towers():
    (a, of_a), (b, of_b) = _net(1), _net(2)
    return a, b, [*of_a, *of_b]


@program
def in_batch_negatives():
    """Two towers; every other row is a negative."""
    left, right, variables = _towers()

    def step(x, y):
        with tf.GradientTape() as tape:
            scores = tf.matmul(left(x), right(y), transpose_b=True)
            labels = tf.range(tf.shape(scores)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))
        _sgd(tape, loss, variables)
        return loss

    return step, variables, _batches(_x, _x)


@program
def contrastive():
    """As in SimCLR: two views of each row, concatenated; a row is not its own negative."""
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            z = tf.math.l2_normalize(net(tf.concat([x, y], 0)), 1)
            k = tf.shape(x)[0]
            scores = tf.matmul(z, z, transpose_b=True) / .5 - 1e9 * tf.eye(2 * k, dtype=z.dtype)
            labels = tf.concat([tf.range(k, 2 * k), tf.range(k)], 0)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))
        _sgd(tape, loss, variables)
        return loss

    return step, variables, _batches(_x, _x)


@program
def siamese():
    """One network for both batches of pairs at a time."""
    net, variables = _net()

    def step(x, y, same):
        with tf.GradientTape() as tape:
            a, b = tf.split(tf.math.l2_normalize(net(tf.concat([x, y], 0)), -1), 2)
            distance = tf.reduce_sum((a - b)**2, -1)
            loss = tf.reduce_mean(same * distance + (1 - same) * tf.nn.relu(1 - distance))
        _sgd(tape, loss, variables)
        return loss, distance

    return step, variables, _batches(_x, _x, lambda rng, k: rng.integers(0, 2, k).astype("float64"))


@tf.custom_gradient
def _reversed_gradient(x):
    return tf.identity(x), lambda dy: -.3 * dy


@program
def domain_adaptation():
    """Features of both domains; labels of the source; and which domain, from gradients that are reversed (DANN)."""
    net, variables = _net()
    domain = _variable("domain", 3, 2)

    def step(source, labels, target):
        rows = tf.shape(source)[0]
        with tf.GradientTape() as tape:
            features = tf.nn.tanh(net(tf.concat([source, target], 0)))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, features[:rows]))
            of_domain = tf.repeat([0, 1], [rows, rows])
            confusion = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                of_domain, _reversed_gradient(features) @ domain))
            total = loss + confusion + .01 * tf.reduce_mean(features[rows:]**2)
        _sgd(tape, total, [*variables, domain])
        return loss, confusion

    return step, [*variables, domain], _batches(_x, _labels, _x)


@program
def mixup():
    """Rows and their mixtures with those of another batch, in one."""
    net, variables = _net()

    def step(x, y, other, share):
        mixed = share[:, None] * x + (1 - share[:, None]) * other
        with tf.GradientTape() as tape:
            outputs = net(tf.concat([x, mixed, other], 0))
            errors = tf.reduce_mean((outputs - tf.tile(y, [3, 1]))**2, -1)
            loss = tf.reduce_mean(errors * tf.concat([tf.ones_like(share), share, 1 - share], 0))
        _sgd(tape, loss, variables)
        return loss, tf.reduce_max(tf.reshape(errors, [3, -1]), 1)

    return step, variables, _batches(_x, _y, _x, lambda rng, k: rng.uniform(size=k))


@program
def map_over_rows():
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum((net(row[0][None])[0] - row[1])**2), (x, y),
                                            fn_output_signature=tf.float64))
        _sgd(tape, loss, variables)
        return loss

    return step, variables, _batches(_x, _y)


@program
def triplets_in_batch():
    """The farthest positive and the nearest negative of each row."""
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            z = net(x)
            squares = tf.reduce_sum(z**2, 1)
            distances = squares[:, None] - 2 * tf.matmul(z, z, transpose_b=True) + squares[None, :]
            same = tf.cast(tf.equal(y[:, None], y[None, :]), z.dtype)
            positive = tf.reduce_max(distances * same, 1)
            negative = tf.reduce_min(distances + 1e3 * same, 1)
            loss = tf.reduce_mean(tf.nn.softplus(positive - negative))
        _sgd(tape, loss, variables)
        return loss

    return step, variables, _batches(_x, _labels)


# ---- sizes that depend on the rows in other ways ------------------------------------------------


def _of_outputs(function):
    """A step that returns what a function makes of the outputs and the number of rows."""
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            made = function(net(x), tf.shape(x)[0])
            loss = tf.reduce_sum(made**2) + tf.reduce_mean((net(x) - y)**2)
        _sgd(tape, loss, variables)
        return made

    return step, variables, _batches(_x, _y, sizes=(3, 7, 2, 1, 12))


@program
def padded_to_eight_rows():
    return _of_outputs(lambda p, k: tf.pad(p, [[0, tf.maximum(0, 8 - k)], [0, 0]], constant_values=1.))


@program
def repeated_to_six_rows():
    return _of_outputs(lambda p, k: tf.tile(p, [tf.maximum(1, 6 // k), 1]) * tf.range(
        1., 1 + tf.cast(k * tf.maximum(1, 6 // k), tf.float64), dtype=tf.float64)[:, None])


@program
def six_rows_at_most():
    return _of_outputs(lambda p, k: p[:tf.minimum(k, 6)])


@program
def reshaped_to_six_rows_at_most():
    step, variables, _ = _of_outputs(lambda p, k: tf.reshape(tf.transpose(p), [tf.minimum(k, 6), -1]))
    return step, variables, _batches(_x, _y, sizes=(3, 2, 6, 1, 12))


@program
def sums_of_other_types():
    """Sums in types that the network does not sum."""
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y)**2)
        _sgd(tape, loss, variables)
        return [tf.reduce_sum(tf.cast(tf.abs(10 * x), dtype), 0) for dtype in (tf.int8, tf.uint8, tf.int16)] + [
            tf.reduce_any(x > 1, 0), tf.reduce_all(x < 1, 0), tf.reduce_max(x, 0), tf.reduce_prod(x, 0)]

    return step, variables, _batches(_x, _y)


# ---- gradients ----------------------------------------------------------------------------------


@program
def clipped_by_global_norm():
    return _supervised(lambda p, y: tf.reduce_mean((p - y)**2),
                       of_gradients=lambda g: tf.clip_by_global_norm(g, .1)[0])


@program
def clipped_by_value():
    return _supervised(lambda p, y: tf.reduce_mean((p - y)**2),
                       of_gradients=lambda g: [tf.clip_by_value(each, -.05, .05) for each in g])


@program
def signs_of_gradients():
    return _supervised(lambda p, y: tf.reduce_mean((p - y)**2), of_gradients=lambda g: [tf.sign(each) for each in g])


@program
def flattened_gradients():
    """All gradients in one vector, clipped, and split again."""
    def changed(gradients):
        flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)
        flat = tf.clip_by_norm(flat, .1)
        parts = tf.split(flat, [g.shape.num_elements() for g in gradients])
        return [tf.reshape(part, g.shape) for part, g in zip(parts, gradients)]
    return _supervised(lambda p, y: tf.reduce_mean((p - y)**2), of_gradients=changed)


@program
def sharpness_aware():
    """SAM: a second gradient, at weights moved by the first."""
    net, variables = _net()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y)**2)
        first = tape.gradient(loss, variables)
        norm = tf.linalg.global_norm(first)
        moves = [.05 * g / (norm + 1e-12) for g in first]
        for variable, move in zip(variables, moves):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            perturbed = tf.reduce_mean((net(x) - y)**2)
        second = tape.gradient(perturbed, variables)
        for variable, move, g in zip(variables, moves, second):
            variable.assign_sub(move)
            variable.assign_sub(_RATE * g)
        return loss, perturbed

    return step, variables, _batches(_x, _y)


@program
def extragradient():
    """Two players, each moved by a gradient at where both would be."""
    a, b = _variable("a", 4, 3), _variable("bb", 4, 3)

    def value(x, y, a, b):
        return tf.reduce_mean((x @ a - y)**2) - tf.reduce_mean((x @ b - y)**2) + tf.reduce_mean((x @ a) * (x @ b))

    def step(x, y):
        with tf.GradientTape() as tape:
            first = value(x, y, a, b)
        da, db = tape.gradient(first, [a, b])
        a2, b2 = a - _RATE * da, b + _RATE * db
        with tf.GradientTape() as tape:
            tape.watch([a2, b2])
            second = value(x, y, a2, b2)
        da, db = tape.gradient(second, [a2, b2])
        a.assign_sub(_RATE * da)
        b.assign_add(_RATE * db)
        return first, second

    return step, [a, b], _batches(_x, _y)


@program
def meta_learning():
    """MAML: the gradient of a loss after a step of gradient descent, through that step."""
    w = _variable("w", 4, 3)

    def step(x, y, x2, y2):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((x @ w - y)**2)
            fast = w - .2 * inner.gradient(loss, w)
            meta = tf.reduce_mean((x2 @ fast - y2)**2)
        _sgd(outer, meta, [w])
        return loss, meta

    return step, [w], _batches(_x, _y, _x, _y)


@program
def gradient_penalty():
    """WGAN-GP: the critic's gradient with respect to its inputs has length one."""
    critic, of_critic = _net(1)
    generator, of_generator = _net(2)

    def step(real, noise):
        fake = tf.concat([generator(noise), noise[:, :1]], 1)
        with tf.GradientTape() as tape:
            middle = (real + fake) / 2
            with tf.GradientTape() as inner:
                inner.watch(middle)
                score = tf.reduce_sum(critic(middle), 1)
            norms = tf.sqrt(tf.reduce_sum(inner.gradient(score, middle)**2, 1) + 1e-9)
            loss = (tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(real)) + tf.reduce_mean((norms - 1)**2))
        _sgd(tape, loss, of_critic)
        with tf.GradientTape() as tape:
            fake = tf.concat([generator(noise), noise[:, :1]], 1)
            of_fake = -tf.reduce_mean(critic(fake))
        _sgd(tape, of_fake, of_generator)
        return loss, of_fake

    return step, [*of_critic, *of_generator], _batches(_x, _x)


@program
def convolutional_gan():
    """Draws noise in the step, and appends the images that are made of it to the real ones: K rows, and 2 K."""
    v, u, f, w = (_variable("v", 3, 8), _variable("u", 2, 2, 1, 2), _variable("f", 2, 2, 1, 3), _variable("w", 12, 1))

    def generator(rows, seed):
        noise = tf.random.stateless_normal((rows, 3), [seed, 2], dtype=tf.float64)
        small = tf.nn.tanh(tf.reshape(noise @ v, [-1, 2, 2, 2]))
        return tf.nn.conv2d_transpose(small, u, (rows, 4, 4, 1), 2, "SAME")

    def discriminator(images):
        return tf.reshape(tf.nn.leaky_relu(tf.nn.conv2d(images, f, 2, "SAME")), [-1, 12]) @ w

    def step(images):
        rows = tf.shape(images)[0]
        labels = tf.concat([tf.ones((rows, 1), tf.float64), tf.zeros((rows, 1), tf.float64)], 0)
        labels += 0.05 * tf.random.stateless_uniform(tf.shape(labels), [1, 5], dtype=tf.float64)
        with tf.GradientTape() as tape:
            logits = discriminator(tf.concat([generator(rows, 1), images], 0))
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        _sgd(tape, loss, [f, w])
        with tf.GradientTape() as tape:
            logits = discriminator(generator(rows, 3))
            of_fake = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros((rows, 1), tf.float64), logits))
        _sgd(tape, of_fake, [v, u])
        return loss, of_fake

    return step, [v, u, f, w], _batches(lambda rng, k: rng.normal(size=(k, 4, 4, 1)))


@program
def differentially_private():
    """DP-SGD: the gradient of each row is clipped; noise is added once."""
    w = _variable("w", 4, 3)

    def step(x, y):
        rows = tf.einsum("ka,kb->kab", x, 2 * (x @ w - y))
        norms = tf.sqrt(tf.reduce_sum(rows**2, [1, 2], keepdims=True))
        clipped = rows * 1. / tf.maximum(norms, tf.ones_like(norms))
        noise = tf.random.stateless_normal([4, 3], [1, 2], dtype=tf.float64)
        gradient = (tf.reduce_sum(clipped, 0) + .1 * noise) / tf.cast(tf.shape(x)[0], tf.float64)
        w.assign_sub(_RATE * gradient)
        return tf.reduce_mean(norms)

    return step, [w], _batches(_x, _y)


@program
def accumulated_in_a_loop():
    """A tf.while_loop over the columns of a sequence adds up gradients."""
    w = _variable("w", 4, 3)

    def step(x, y):
        def body(t, total):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x[:, t] @ w - y)**2)
            return t + 1, total + tape.gradient(loss, w)
        _, total = tf.while_loop(lambda t, _: t < 3, body, (0, tf.zeros([4, 3], tf.float64)))
        w.assign_sub(_RATE * total)
        return tf.reduce_sum(total)

    return step, [w], _batches(lambda rng, k: rng.normal(size=(k, 3, 4)), _y)


@program
def only_if_finite():
    """Loss scaling by hand: no update where a gradient is not finite."""
    net, variables = _net()
    scale = tf.Variable(np.float64(8.), name="scale")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y)**2)
            scaled = loss * scale
        gradients = [g / scale for g in tape.gradient(scaled, variables)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

        def update():
            for variable, g in zip(variables, gradients):
                variable.assign_sub(_RATE * g)
            scale.assign(scale * 2)
            return 1

        return loss, tf.cond(finite, update, lambda: 0)

    batches = _batches(_x, _y)
    batches[1][0][11, 0] = np.inf  # a row of the last rank
    return step, [*variables, scale], batches


@program
def learning_rate_of_the_batch():
    """A value that only one rank has decides for all ranks."""
    net, variables = _net()

    def step(x, y, rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x) - y)**2)
        for variable, g in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(tf.where(loss > .5, rate, rate / 2) * g)
        return loss

    return step, variables, [(*batch, np.float64(.1)) for batch in _batches(_x, _y)]


# ---- models -------------------------------------------------------------------------------------


@program
def mixture_of_experts():
    """A gate over four experts, with Switch Transformer's load-balancing loss, a product of two batch means."""
    gate, experts = _variable("gate", 4, 4), _variable("experts", 4, 4, 3)

    def step(x, y):
        with tf.GradientTape() as tape:
            probabilities = tf.nn.softmax(x @ gate)
            chosen = tf.one_hot(tf.argmax(probabilities, 1), 4, dtype=tf.float64)
            outputs = tf.einsum("kd,edo,ke->ko", x, experts, chosen * probabilities)
            balance = 4 * tf.reduce_sum(tf.reduce_mean(chosen, 0) * tf.reduce_mean(probabilities, 0))
            loss = tf.reduce_mean((outputs - y)**2) + .1 * balance
        _sgd(tape, loss, [gate, experts])
        return loss

    return step, [gate, experts], _batches(_x, _y)


@program
def vector_quantizer():
    """VQ-VAE whose codes are moving averages of the inputs assigned to them."""
    encoder, decoder = _variable("encoder", 4, 2), _variable("decoder", 2, 4)
    codes, counts = _variable("codes", 5, 2), tf.Variable(np.ones(5), name="counts")
    sums = tf.Variable(codes.numpy(), name="sums")

    def step(x):
        with tf.GradientTape() as tape:
            z = x @ encoder
            distances = tf.reduce_sum((z[:, None] - codes[None])**2, 2)
            chosen = tf.one_hot(tf.argmin(distances, 1), 5, dtype=tf.float64)
            quantized = chosen @ codes
            straight = z + tf.stop_gradient(quantized - z)
            loss = tf.reduce_mean((straight @ decoder - x)**2) + .25 * tf.reduce_mean(
                (tf.stop_gradient(quantized) - z)**2)
        _sgd(tape, loss, [encoder, decoder])
        counts.assign(.9 * counts + .1 * tf.reduce_sum(chosen, 0))
        sums.assign(.9 * sums + .1 * tf.matmul(chosen, z, transpose_a=True))
        codes.assign(sums / (counts[:, None] + 1e-5))
        return loss

    return step, [encoder, decoder, codes, counts, sums], _batches(_x)


@program
def conditional_random_field():
    """A linear-chain CRF: the forward algorithm over a sequence, in a loop."""
    w, transitions = _variable("w", 4, 3), _variable("transitions", 3, 3)

    def step(x, tags):
        with tf.GradientTape() as tape:
            scores = x @ w

            def body(t, alpha):
                return t + 1, tf.reduce_logsumexp(alpha[:, :, None] + transitions[None], 1) + scores[:, t]

            _, alpha = tf.while_loop(lambda t, _: t < 5, body, (1, scores[:, 0]))
            unary = tf.reduce_sum(tf.gather(scores, tags, batch_dims=2, axis=2), 1)
            pairs = tf.reduce_sum(tf.gather_nd(transitions, tf.stack([tags[:, :-1], tags[:, 1:]], 2)), 1)
            loss = tf.reduce_mean(tf.reduce_logsumexp(alpha, 1) - unary - pairs)
        _sgd(tape, loss, [w, transitions])
        return loss

    return step, [w, transitions], _batches(lambda rng, k: rng.normal(size=(k, 5, 4)),
                                            lambda rng, k: rng.integers(0, 3, (k, 5)))


@program
def embedding_with_adam():
    """Slices, through a fused or a plain optimizer; rows of a batch meet in the table."""
    table, w = _variable("table", 8, 4), _variable("w", 4, 3)
    moments = [tf.Variable(np.zeros((8, 4)), name=name) for name in ("m", "v")]

    def step(words, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_mean(tf.nn.embedding_lookup(table, words), 1) @ w - y)**2)
        g, dw = tape.gradient(loss, [table, w])
        w.assign_sub(_RATE * dw)
        g = tf.math.unsorted_segment_sum(g.values, g.indices, 8)
        m, v = moments
        m.assign(.9 * m + .1 * g)
        v.assign(.99 * v + .01 * g**2)
        table.assign_sub(.01 * m / (tf.sqrt(v) + 1e-3))
        return loss

    return step, [table, w, *moments], _batches(lambda rng, k: rng.integers(0, 8, (k, 3)), _y)


@program
def sparse_updates():
    """IndexedSlices that are scattered into the variable."""
    table = _variable("table", 8, 3)

    def step(words, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_sum(tf.gather(table, words), 1) - y)**2)
        g = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(_RATE * g.values, g.indices))
        return loss

    return step, [table], _batches(lambda rng, k: rng.integers(0, 8, (k, 3)), _y)


@program
def batch_norm_by_hand():
    """Moments of the batch; their moving averages are variables."""
    net, variables = _net()
    average = tf.Variable(np.zeros(3), name="average")

    def step(x, y):
        with tf.GradientTape() as tape:
            p = net(x)
            mean, variance = tf.nn.moments(p, [0])
            p = (p - mean) / tf.sqrt(variance + 1e-3)
            loss = tf.reduce_mean((p - y)**2)
        _sgd(tape, loss, variables)
        average.assign(.9 * average + .1 * mean)
        return loss

    return step, [*variables, average], _batches(_x, _y)


def _keras(layers, x, y, loss):
    """A Keras model with a Keras optimizer, in a custom step."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(layers())
    optimizer = keras.optimizers.SGD(_RATE)
    batches = _batches(x, y)
    model(batches[0][0])
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) + sum(model.losses)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return step, [v.value for v in model.variables], batches


@program
def keras_dropout_and_noise():
    """Random numbers are those of one process."""
    return _keras(lambda: [keras.layers.Dense(6, "relu"), keras.layers.Dropout(.5), keras.layers.GaussianNoise(.1),
                           keras.layers.Dense(3)], _x, _y, keras.losses.MeanSquaredError())


@program
def keras_convolutions():
    """Images, augmented in the model, with batch norm over the whole batch."""
    def layers():
        return [keras.layers.RandomFlip(), keras.layers.Conv2D(4, 3, padding="same"),
                keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.MaxPooling2D(),
                keras.layers.Flatten(), keras.layers.Dense(3)]
    return _keras(layers, lambda rng, k: rng.normal(size=(k, 6, 6, 2)), _labels,
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@program
def keras_recurrent():
    return _keras(lambda: [keras.layers.LSTM(5, return_sequences=True), keras.layers.GRU(4), keras.layers.Dense(3)],
                  lambda rng, k: rng.normal(size=(k, 4, 3)), _y, keras.losses.MeanSquaredError())


class _BatchLoss(keras.layers.Layer):
    """Adds a Keras loss, and a vector, from within."""

    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(tf.zeros_like(x), x))
        self.add_loss(tf.reduce_sum(.1 * tf.reduce_mean(x**2, 1)))
        return x


@program
def keras_losses_in_layers():
    # Not "l1", which before Keras 3.15 has single precision.
    l1 = keras.regularizers.L1L2(0.01)
    return _keras(lambda: [keras.layers.Dense(6, "tanh", activity_regularizer="l2", kernel_regularizer=l1),
                           _BatchLoss(), keras.layers.Dense(3)], _x, _y, keras.losses.Huber())


@program
def keras_attention():
    def layers():
        inputs = keras.Input((None,), dtype="int32")
        x = keras.layers.Embedding(11, 8, mask_zero=True)(inputs)
        x = x + keras.layers.MultiHeadAttention(2, 4, dropout=.1)(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x)
        return [keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))]
    return _keras(layers, lambda rng, k: rng.integers(0, 11, (k, 5)).astype("int32"), _labels,
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))


# ---- matrices of rows against rows --------------------------------------------------------------

# Their sums over rows are received by other ranks, with a size for each row.


def _distances(a, b):
    return tf.reduce_sum((a[:, None] - b[None])**2, -1)


_MATRICES = {
    "outputs_by_batch": lambda a, b, x: tf.matmul(a, x, transpose_b=True),
    "outputs_by_outputs": lambda a, b, x: tf.matmul(a, b, transpose_b=True),
    "outputs_by_themselves": lambda a, b, x: tf.matmul(a, a, transpose_b=True),
    "distances_to_batch": lambda a, b, x: _distances(a, x),
    "distances_of_outputs": lambda a, b, x: _distances(a, a),
    "kernel_of_batch": lambda a, b, x: tf.exp(-_distances(x, x)) * a[:, :1],
    "masked": lambda a, b, x: tf.matmul(a, a, transpose_b=True) - 9. * tf.cast(x[:, :1] < x[:, 0][None], tf.float64),
}


def _of_columns(matrix):
    """A loss of the columns of a matrix: centred, normalised, and by their moments."""
    return (tf.reduce_mean((matrix - tf.reduce_mean(matrix, 0, keepdims=True))**2)
            + tf.reduce_mean(tf.reduce_logsumexp(matrix, 0))
            + tf.reduce_mean(tf.sqrt(.1 + tf.math.reduce_variance(matrix, 0)))
            + tf.reduce_mean(tf.nn.l2_normalize(matrix, 0)[:, 0])
            + tf.reduce_mean(matrix / tf.reduce_sum(1 + tf.abs(matrix), 0, keepdims=True))
            + tf.reduce_mean(tf.nn.moments(matrix, [0])[1]))


def _similarities(matrix):
    def build():
        variables = [_variable("w", 4, 4, seed=seed) for seed in (1, 2)]

        def step(x):
            with tf.GradientTape() as tape:
                loss = _of_columns(matrix(tf.sin(x @ variables[0]), tf.cos(x @ variables[1]), x))
            for variable, gradient in zip(variables, tape.gradient(loss, variables)):
                if gradient is not None:
                    variable.assign_sub(_RATE * gradient)
            return loss

        return step, variables, _batches(_x)
    return build


PROGRAMS |= {f"similarities_{name}": _similarities(matrix) for name, matrix in _MATRICES.items()}


# ---- steps in which a gradient is hard to find --------------------------------------------------


def _of_training_steps(make):
    def build():
        variables = training_steps.weights()
        step = make(variables)
        rows = (8, 8) if make is training_steps._stateful else SIZES

        def returning(x, y):
            step(x, y)
            return tf.reduce_sum(x)

        batches = [tuple(training_steps.batch(k, i).values()) for i, k in enumerate(rows)]
        return returning, variables, batches
    return build


# Of noise, one process would draw the first numbers again for a batch of another size, for which it traces anew.
PROGRAMS |= {name.replace(",", "").replace(" ", "_"): _of_training_steps(make)
             for name, make in training_steps.STEPS.items() if name != "noise"}
