#include "qc_dtype.h"

#include <stddef.h>
#include <string.h>

static const struct {
    qc_dtype dtype;
    const char *name;
    int bits;
} table[] = {
    {QC_DT_F32, "F32", 32},
    {QC_DT_F16, "F16", 16},
    {QC_DT_BF16, "BF16", 16},
    {QC_DT_F64, "F64", 64},
    {QC_DT_I8, "I8", 8},
    {QC_DT_U8, "U8", 8},
    {QC_DT_I16, "I16", 16},
    {QC_DT_U16, "U16", 16},
    {QC_DT_I32, "I32", 32},
    {QC_DT_U32, "U32", 32},
    {QC_DT_I64, "I64", 64},
    {QC_DT_U64, "U64", 64},
    {QC_DT_BOOL, "BOOL", 8},
    {QC_DT_F8_E4M3, "F8_E4M3", 8},
    {QC_DT_F8_E5M2, "F8_E5M2", 8},
    {QC_DT_F8_E8M0, "F8_E8M0", 8},
    {QC_DT_F8_E4M3FNUZ, "F8_E4M3FNUZ", 8},
    {QC_DT_F8_E5M2FNUZ, "F8_E5M2FNUZ", 8},
    {QC_DT_F4, "F4", 4},
    {QC_DT_F6_E2M3, "F6_E2M3", 6},
    {QC_DT_F6_E3M2, "F6_E3M2", 6},
    {QC_DT_C64, "C64", 64},
    {QC_DT_GRID, "GRID", 0},
};

const char *qc_dtype_name(qc_dtype dtype)
{
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].dtype == dtype)
            return table[i].name;
    return "?";
}

qc_dtype qc_dtype_from_name(const char *name)
{
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].bits && strcmp(table[i].name, name) == 0)
            return table[i].dtype;
    return QC_DT_INVALID;
}

int qc_dtype_bits(qc_dtype dtype)
{
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].dtype == dtype)
            return table[i].bits;
    return 0;
}
