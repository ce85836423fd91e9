#include "writer.h"

#include "engine_format.h"
#include "gguf_write.h"
#include "qc_file.h"
#include "qc_outfolder.h"
#include "qpk.h"

#include <string.h>

static const qc_writer_format *const formats[] = {
    &qc_qpk_writer_format, &qc_gptq_writer_format, &qc_awq_writer_format,  &qc_ct_writer_format,
    &qc_hf_writer_format,  &qc_gguf_writer_format, &qc_onnx_writer_format,
};

const qc_writer_format *qc_writer_format_at(int i)
{
    return i >= 0 && i < (int)(sizeof formats / sizeof formats[0]) ? formats[i] : NULL;
}

const qc_writer_format *qc_writer_format_find(const char *name)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (strcmp(formats[i]->name, name) == 0)
            return formats[i];
    return NULL;
}

int qc_writer_check_path(const qc_writer_format *format, const char *path, bool force, qc_err *err)
{
    return format->extension ? qc_outfile_check(path, force, err) : qc_outfolder_check(path, force, err);
}
