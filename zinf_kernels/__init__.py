"""Kernels that zinf uses and that know nothing of zinf: one op in each folder.

What calls each op:

* `elementwise`: element-wise updates on the host (`zinf.core.optim.host.looped`).
* `attention`: attention of all models (`zinf.models.gpt`, `zinf.hf.attention`).
* `cross_entropy`: the last layer and the loss in tiles (`zinf.tiling.loss`).
* `tiled_matmul`: the matmuls of tiled layers and MLPs (`zinf.tiling.matmul`), if they
  are traced for one Hopper GPU or in `jax.shard_map`; XLA's matmuls elsewhere.
* `quantize`: frozen weights in int8 (`zinf.adapt.blocks`), and parameters that are
  gathered as integers (`zinf.core.sharding.encoding`).
"""
