/* qinspect: list, check and hash checkpoints and packed files, and run their tokenizers. */
#include "inspect.h"
#include "main.h"
#include "programs.h"

#include <string.h>

static int inspect(const qc_args *args, qc_err *err)
{
    if (args->n_operands == 0)
        return qc_args_fail(args->program, err, "no PATH given");
    const char *path = args->operands[0], *command = args->command ? args->command : "";
    bool json = qc_args_has(args, "json"), jsonl = qc_args_has(args, "jsonl");
    if (strcmp(command, "tokenize") == 0)
        return qc_inspect_tokenize(path,
                                   &(qc_encode_options){.add_special = qc_args_has(args, "special"),
                                                        .plain_special = qc_args_has(args, "plain-special")},
                                   jsonl, err);
    if (strcmp(command, "detokenize") == 0)
        return qc_inspect_detokenize(path, jsonl, err);
    if (strcmp(command, "hash") == 0)
        return qc_inspect_hash(path, json, err);
    if (qc_args_has(args, "check"))
        return qc_inspect_check(path, json, err);
    return qc_inspect_list(path, json, err);
}

int main(int argc, char **argv)
{
    return qc_main(&qc_program_qinspect, argc, argv, inspect);
}
