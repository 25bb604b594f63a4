"""Lists of primitives: elementwise, without a derivative, with rules, recomputed."""

# Entry i of every output depends only on entry i of the inputs (and on scalar inputs).
# A missing primitive costs only speed or memory: such code does not run in blocks.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc
    exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2
    logistic lt max min mul ne neg nextafter not one_minus_square or pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)

# jax gives the outputs of these primitives no tangent, even if their inputs have one.
ZERO_DERIVATIVE = frozenset("ceil floor round sign stop_gradient".split())

# Calls of functions with derivatives of their own, and of `jax.checkpoint`.
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
REMAT = frozenset({"remat", "remat2", "remat3", "checkpoint"})
