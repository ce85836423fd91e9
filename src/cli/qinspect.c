/* qinspect: list, check and hash checkpoints and packed files, and run their tokenizers. */
#include "inspect.h"
#include "main.h"
#include "programs.h"
#include "schema.h"

#include <string.h>

static int account(const qc_args *args, const char *path, bool json, qc_err *err)
{
    const char *model = qc_args_value(args, "model"), *report = qc_args_value(args, "report");
    const char *text = qc_args_value(args, "tolerance");
    double tolerance = 0.001;
    qc_err why;
    if (!model || !report)
        return qc_args_fail(args->program, err, "account needs --model and --report");
    if (text && (qc_parse_float(text, &tolerance, &why) < 0 || !(tolerance >= 0)))
        return qc_args_fail(args->program, err, "--tolerance: '%.60s' is no fraction", text);
    return qc_inspect_account(path, model, report, tolerance, json, err);
}

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
    if (strcmp(command, "account") == 0)
        return account(args, path, json, err);
    if (strcmp(command, "hash") == 0)
        return qc_inspect_hash(path, json, err);
    const char *engine = qc_args_value(args, "engine");
    if (engine)
        return qc_inspect_engine(path, engine, json, err);
    if (qc_args_has(args, "check"))
        return qc_inspect_check(path, json, err);
    return qc_inspect_list(path, json, err);
}

int main(int argc, char **argv)
{
    return qc_main(&qc_program_qinspect, argc, argv, inspect);
}
