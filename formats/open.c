#include "open.h"

#include "gguf.h"
#include "hfdir.h"
#include "onnx.h"
#include "qc_file.h"
#include "qpk.h"

#include <string.h>
#include <strings.h>

/* Kinds that are recognised in order to be refused by name: by first bytes, by extension, or both. */
static const struct {
    const char *magic; /* NULL: any content */
    const char *extension;
    const char *refusal;
} foreign[] = {
    {NULL, ".gguf", "no GGUF file: it does not begin with \"GGUF\""},
    {NULL, ".safetensors",
     "one safetensors file is no model: give the folder that holds it and its config.json"},
    {NULL, ".json", "a json file is no model: give the folder that holds it"},
    {NULL, ".onnx", "one ONNX file is no model: give the folder that holds it and its config.json"},
    {NULL, ".bin", "PyTorch pickle files are not read: convert the checkpoint to safetensors"},
    {NULL, ".pt", "PyTorch pickle files are not read: convert the checkpoint to safetensors"},
    {NULL, ".pth", "PyTorch pickle files are not read: convert the checkpoint to safetensors"},
    {NULL, ".h5", "HDF5 files are not read"},
    {NULL, ".tflite", "TFLite files are not read"},
};

static bool has_extension(const char *path, const char *extension)
{
    size_t n = strlen(path), m = strlen(extension);
    return n > m && strcasecmp(path + n - m, extension) == 0;
}

int qc_source_open(const char *path, qc_source **ret, qc_err *err)
{
    if (qc_path_is_dir(path))
        return qc_onnx_probe_path(path) ? qc_onnx_open(path, ret, err) : qc_hfdir_open(path, ret, err);
    if (qc_qpk_probe(path))
        return qc_qpk_open(path, ret, err);
    if (qc_gguf_probe_path(path))
        return qc_gguf_open(path, ret, err);
    qc_mapped map = {0};
    QC_TRY(qc_file_map(path, &map, err));
    bool empty = map.n_bytes == 0;
    size_t hit = 0, n_foreign = sizeof foreign / sizeof foreign[0];
    for (; hit < n_foreign; hit++) {
        const char *magic = foreign[hit].magic;
        if (magic ? map.n_bytes >= strlen(magic) && memcmp(map.data, magic, strlen(magic)) == 0
                  : has_extension(path, foreign[hit].extension))
            break;
    }
    qc_file_unmap(&map);
    if (empty)
        return qc_fail(err, QC_E_INPUT, "%s: empty file, a model was expected", path);
    if (hit < n_foreign)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: %s", path, foreign[hit].refusal);
    return qc_fail(err, QC_E_INPUT, "%s: neither a checkpoint folder nor a packed file", path);
}
