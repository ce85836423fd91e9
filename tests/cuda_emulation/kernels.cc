/* The kernels themselves, as C++. */
#include "../../src/compute/cuda/attention.cu"
#include "../../src/compute/cuda/factor.cu"
#include "../../src/compute/cuda/quant.cu"
#include "../../src/compute/cuda/round.cu"
#include "../../src/compute/cuda/rows.cu"
#include "../../src/compute/cuda/score.cu"
