/* Choice of the kernels: reference first, then each instruction set in ascending order. */
#include "kern.h"

void qc_kern_init(qc_kern *kern, uint32_t cpu_flags)
{
    qc_kern_init_ref(kern);
    (void)cpu_flags;
}
