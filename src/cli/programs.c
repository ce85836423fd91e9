#include "programs.h"

#include <stddef.h>

/* ---- qconvert ---- */

static const qc_opt qconvert_opts[] = {
    {"method", .group = "Quantization", .key = "quantize.method"},
    {"bits", 'b', .key = "quantize.weights.bits"},
    {"group", 'g', .key = "quantize.weights.group"},
    {"symmetric", .key = "quantize.weights.symmetric", .value = "true",
     .help = "grid without zero points (the default)"},
    {"asymmetric", .key = "quantize.weights.symmetric", .value = "false",
     .help = "grid with a zero point per group"},
    {"search", .key = "quantize.weights.search"},
    {"group-fallback", .key = "quantize.weights.group_fallback"},
    {"bits-average", .key = "quantize.budget.bits_average"},
    {"size", .key = "quantize.budget.size"},
    {"embedding-bits", .key = "quantize.embedding.bits"},
    {"override", .key = "quantize.overrides", .arg = "GLOB:KEY=N,...",
     .help = "another grid for tensors whose name matches, as '*.down_proj:bits=8,group=64'; may be "
             "repeated, later "
             "ones win, those of the recipe come first"},
    {"skip", .key = "quantize.skip", .arg = "GLOB",
     .help = "leave tensors whose name matches in 16 bit; may be repeated"},
    {"calib", .group = "Calibration", .key = "calibration.text"},
    {"statistics", .key = "calibration.statistics"},
    {"calib-windows", .key = "calibration.windows"},
    {"calib-length", .key = "calibration.length"},
    {"seed", .key = "calibration.seed"},
    {"calibrate-all-experts", .key = "calibration.experts", .value = "all",
     .help = "statistics of each expert from all tokens, not only from those that the router sends to it"},
    {"output", 'o', .group = "Output", .key = "emit.0.path"},
    {"format", .key = "emit.0.format"},
    {"type", .key = "emit.0.type"},
    {"engine", .key = "emit.0.engine"},
    {"report", .key = "report.json"},
    {"html", .key = "report.html"},
    {"markdown", .key = "report.markdown"},
    {"junit", .key = "report.junit"},
    {"manifest", .key = "report.manifest"},
    {"force", 'f', .help = "replace outputs that exist, once the new ones are verified"},
    {"keep-failed", .help = "keep an artifact whose gate failed under its own name, not as NAME.rejected"},
    {"text", .group = "Verification", .key = "verify.text"},
    {"reference", .key = "verify.reference"},
    {"protocol", .key = "verify.protocol"},
    {"windows", .key = "verify.windows"},
    {"length", .key = "verify.length"},
    {"stride", .key = "verify.stride"},
    {"bos", .key = "verify.bos"},
    {"plain-special", .key = "verify.plain_special", .value = "true",
     .help = "text that spells a special token is ordinary text, not that token"},
    {"gate", .key = "verify.gates", .arg = "NAME=LIMIT",
     .help = "limit that the artifact must keep, as ppl_ratio=1.08: at most this, at least for top1; may be "
             "repeated"},
    {"noise-floor", .key = "verify.noise_floor", .value = "true",
     .help = "also measure the reference (without one, the model) against itself under other arithmetic"},
    {"decide", .key = "verify.decide", .value = "true",
     .help = "score windows only until the gates are decided, with 5 % error either way"},
    {"no-verify", .key = "verify.enabled", .value = "false", .help = "do not measure what was written"},
    {"device", .group = "Machine", .key = "run.device"},
    {"compute", .key = "run.compute"},
    {"threads", 't', .key = "run.threads"},
    {"memory", .key = "run.memory"},
    {"allow-nonfinite", .key = "run.allow_nonfinite", .value = "true",
     .help = "leave matrices with NaN or infinity in 16 bit instead of refusing them; measuring such a model "
             "fails: --no-verify"},
    {"demo", .group = "Run",
     .help = "convert the small model that comes with the program; without -o into the folder "
             "qconvert-demo, whose files are replaced"},
    {"dry-run", 'n', .help = "print the plan (memory, disk, steps) and stop"},
    {"resume", .help = "go on with a calibrated run that was interrupted, from the OUT.journal that it left; "
                       "without one start anew"},
    {"json", .help = "print the report, or with --dry-run the plan, as JSON on stdout"},
    {"set", 's', .key = "", .arg = "KEY=VALUE",
     .help = "set any key of the recipe, as verify.windows=16 or emit.0.path=out.qpk; a value that begins "
             "with [ or { "
             "is read as YAML; may be repeated"},
    {0}};

static const char *const qconvert_synopsis[] = {"RECIPE.yaml [OPTION...]", "MODEL -o OUT.qpk [OPTION...]",
                                                "--demo [OPTION...]", NULL};

static const qc_opt_note qconvert_examples[] = {
    {"qconvert models/Qwen3-0.6B --bits 4 --group 128 -o model.qpk",
     "quantize a checkpoint folder to 4 bit and measure the result"},
    {"qconvert models/Qwen3-0.6B --method gptq --calib calib.txt -o model.qpk",
     "round by second order statistics of a text (GPTQ)"},
    {"qconvert recipe.yaml --set verify.windows=4 --force", "run a recipe, with a shorter measurement"},
    {"qconvert models/Qwen3-0.6B -b 8 -o model.qpk --gate ppl_ratio=1.003",
     "fail (exit code 1) if the perplexity rises by more than 0.3 %"},
    {"qconvert models/Qwen3-0.6B -b 4 --format gptq --engine vllm -o Qwen3-0.6B-GPTQ",
     "a folder that vllm loads, refused at once if it would not"},
    {"qconvert recipe.yaml --dry-run", "show what would be done"},
    {0}};

const qc_program qc_program_qconvert = {
    .name = "qconvert",
    .summary = "quantize a checkpoint and prove the result good",
    .synopsis = qconvert_synopsis,
    .description =
        "Read a Hugging Face checkpoint, put its weights on integer grids, write a packed file, "
        "read that back and "
        "measure it against the 16-bit model with a forward pass of its own: perplexity and KL "
        "divergence. Gates "
        "decide the exit code.\n\n"
        "A recipe (YAML) holds everything that can be set; options win over it. Relative paths in "
        "a recipe are taken "
        "from its folder, those of options from the current one.\n\n"
        "docs/recipe.md lists all keys of a recipe, docs/report.md says what the printed figures mean and "
        "what to do when a gate fails; both are installed in share/doc/qconvert.",
    .opts = qconvert_opts,
    .examples = qconvert_examples,
    .max_operands = 1,
    .takes_recipe = true,
    .judges = true,
};

/* ---- qinspect ---- */

static const qc_opt qinspect_opts[] = {
    {"json", .group = "Output", .command = "PATH|hash|account", .help = "print JSON with a version number"},
    {"check", .command = "PATH",
     .help = "check everything: sums of a packed file; headers, NaN and infinity of a checkpoint"},
    {"engine", .command = "PATH", .arg = "NAME",
     .help = "say what an engine would refuse (exit code 4) or run badly: vllm, transformers, llama.cpp, "
             "onnxruntime"},
    {"model", .group = "Account", .command = "account", .arg = "MODEL",
     .help = "what the artifact was made of"},
    {"report", .command = "account", .arg = "FILE", .help = "report of the run that made it"},
    {"tolerance", .command = "account", .arg = "FRACTION", .deflt = "0.001",
     .help = "errors that differ by more, as a fraction of that in the report, are not those of the report"},
    {"special", .group = "Tokenizer", .command = "tokenize",
     .help = "add the special tokens that the tokenizer adds"},
    {"plain-special", .command = "tokenize",
     .help = "text that spells a special token is ordinary text, not that token"},
    {"jsonl", .command = "tokenize|detokenize",
     .help = "each line of stdin is a JSON string (tokenize) or an array of ids (detokenize), each line of "
             "stdout "
             "the answer: an array, or a string"},
    {0}};

static const char *const qinspect_synopsis[] = {"PATH [--json] [--check | --engine=NAME]",
                                                "tokenize PATH [--special] [--jsonl]",
                                                "detokenize PATH [--jsonl]",
                                                "hash PATH",
                                                "account FILE --model=MODEL --report=REPORT",
                                                NULL};

static const qc_opt_note qinspect_commands[] = {
    {"tokenize", "text on stdin to an array of token ids on stdout; PATH is a tokenizer.json (its own rules "
                 "only), a model folder "
                 "(tokenizer_config.json counts too), a packed file or a GGUF file"},
    {"detokenize", "array of token ids on stdin to text on stdout"},
    {"account", "compare the error of each quantized tensor, taken from the bytes of FILE and of the model, "
                "with what the report of "
                "the run says; exit code 1 if one differs"},
    {"hash", "SHA-256 of a file, or of every file of a folder"},
    {0}};

static const qc_opt_note qinspect_examples[] = {
    {"qinspect models/Qwen3-0.6B", "list the tensors of a checkpoint"},
    {"qinspect --check model.qpk", "compare a packed file with its sums"},
    {"qinspect tokenize models/Qwen3-0.6B --special < text.txt", "ids of a text"},
    {0}};

const qc_program qc_program_qinspect = {
    .name = "qinspect",
    .summary = "list, check and hash checkpoints and packed files, and run their tokenizers",
    .synopsis = qinspect_synopsis,
    .description =
        "Without a command: list the tensors of a checkpoint folder, packed file or GGUF file, with "
        "type, shape and bytes.\n\n"
        "Text must be UTF-8: invalid bytes are an error that names the first of them (exit code "
        "3). With --jsonl such a "
        "line, and one that is no JSON string or holds a surrogate without its partner, is "
        "answered by null, the other "
        "lines are answered as ever, and the first bad line is named at the end (exit code 3). "
        "Special tokens that are "
        "spelled in the text become those tokens.",
    .commands = qinspect_commands,
    .opts = qinspect_opts,
    .examples = qinspect_examples,
    .max_operands = 1,
    .judges = true,
};

/* ---- qeval ---- */

static const qc_opt qeval_opts[] = {
    {"reference", 'r', .group = "Evaluation", .arg = "MODEL|FILE",
     .help = "measure against this model, or what --save-reference stored of one: KL divergence, agreement"},
    {"save-reference", .arg = "FILE",
     .help = "store the scores of MODEL for later comparisons, which then need not run it"},
    {"force", 'f', .help = "replace a stored reference that exists"},
    {"text", .key = "verify.text"},
    {"protocol", .key = "verify.protocol"},
    {"windows", .key = "verify.windows"},
    {"length", .key = "verify.length"},
    {"stride", .key = "verify.stride"},
    {"bos", .key = "verify.bos"},
    {"plain-special", .key = "verify.plain_special", .value = "true",
     .help = "text that spells a special token is ordinary text, not that token"},
    {"ids", .arg = "FILE",
     .help = "score the token ids of a JSON list of lists instead of a text; with --json the answer "
             "is, per list, the number of scored ids (all but the first), their summed negative "
             "log-likelihood and how many of them the model holds likeliest"},
    {"gate", .key = "verify.gates", .arg = "NAME=LIMIT",
     .help =
         "limit that the model must keep, as ppl_ratio=1.003: at most this, at least for top1; exit code 1 "
         "if not; may be repeated"},
    {"noise-floor", .key = "verify.noise_floor", .value = "true",
     .help = "also measure the reference (without one, the model) against itself under other arithmetic"},
    {"decide", .key = "verify.decide", .value = "true",
     .help =
         "score windows only until the gates are decided, with 5 % error either way; all windows of the text "
         "unless --windows says less"},
    {"task", .group = "Label task", .arg = "NAME|FILE",
     .help = "instead of a text score the choices of the rows of --data: ag_news, or a JSON file"},
    {"data", .arg = "FILE", .help = "rows of the task: .jsonl, else CSV"},
    {"items", .arg = "N", .help = "only N rows, evenly spread; default all"},
    {"calibrate", .help = "also with contextual calibration"},
    {"json", .group = "Output", .help = "print JSON"},
    {"device", .group = "Machine", .key = "run.device"},
    {"compute", .key = "run.compute"},
    {"threads", 't', .key = "run.threads"},
    {"memory", .key = "run.memory"},
    {0}};

static const char *const qeval_synopsis[] = {
    "MODEL [--reference MODEL] [OPTION...]", "MODEL --save-reference FILE [OPTION...]",
    "MODEL --task NAME|FILE --data FILE [--reference MODEL] [OPTION...]", "MODEL --ids FILE [--json]", NULL};

static const qc_opt_note qeval_examples[] = {
    {"qeval models/Qwen3-0.6B --text wikitext2.txt --windows 16 --length 2048", "perplexity of a checkpoint"},
    {"qeval model.qpk --reference models/Qwen3-0.6B --text wikitext2.txt --json",
     "perplexity, KL divergence and agreement of a packed file"},
    {"qeval models/Qwen3-0.6B --text wikitext2.txt --save-reference qwen3.klr",
     "store what the comparison needs of the reference"},
    {"qeval model.qpk --text wikitext2.txt --reference qwen3.klr", "compare without the reference"},
    {0}};

const qc_program qc_program_qeval = {
    .name = "qeval",
    .summary = "perplexity and KL divergence of a model",
    .synopsis = qeval_synopsis,
    .description =
        "Cut a text into windows, run the model over each from position 0 and print the perplexity: exp of "
        "the mean negative log-likelihood of the scored tokens. With a reference both models walk the same "
        "windows and their distributions are compared exactly: KL divergence, change of the probability of "
        "the true token, agreement, each with its standard error.\n\n"
        "docs/report.md says what each protocol scores and what the figures mean; it is installed in "
        "share/doc/qconvert.",
    .opts = qeval_opts,
    .examples = qeval_examples,
    .max_operands = 1,
};

/* ---- qcalib ---- */

static const qc_opt qcalib_opts[] = {
    {"output", 'o', .group = "Output", .command = "make|merge|imatrix", .arg = "FILE",
     .help = "what to write"},
    {"force", 'f', .command = "make|merge|imatrix", .help = "replace an output that exists"},
    {"json", .command = "show", .help = "print JSON"},
    {"text", .group = "Calibration", .command = "make", .key = "calibration.text"},
    {"preset", .command = "make", .arg = "NAME",
     .help = "quick (16 windows of 512 tokens), standard (128 of 2048) or thorough (256 of 2048); the length "
             "is cut to what the model allows, --windows and --length win"},
    {"windows", .command = "make", .key = "calibration.windows"},
    {"length", .command = "make", .key = "calibration.length"},
    {"sample", .command = "make", .key = "calibration.sample"},
    {"seed", .command = "make", .key = "calibration.seed"},
    {"documents", .command = "make", .key = "calibration.documents"},
    {"plain-special", .command = "make", .key = "calibration.plain_special", .value = "true",
     .help = "text that spells a special token is ordinary text, not that token"},
    {"shard", .command = "make", .arg = "I/N",
     .help = "only the Ith of N parts of the windows, cut between blocks of 2048 tokens; merge puts them "
             "together"},
    {"perplexity-limit", .command = "make", .key = "calibration.perplexity_limit"},
    {"no-perplexity", .command = "make", .help = "do not measure the model on the first of the text"},
    {"device", .group = "Machine", .key = "run.device"},
    {"compute", .key = "run.compute"},
    {"threads", 't', .key = "run.threads"},
    {"memory", .key = "run.memory"},
    {0}};

static const char *const qcalib_synopsis[] = {"make MODEL --text FILE -o OUT.qcs [OPTION...]",
                                              "merge FILE... -o OUT.qcs", "show FILE [--json]",
                                              "imatrix FILE -o OUT.gguf", NULL};

static const qc_opt_note qcalib_commands[] = {
    {"make", "run a model over a text and write the statistics of all inputs of its matrices"},
    {"merge", "put shards of one text together, in any order"},
    {"show", "print what a file holds, after checking all of it"},
    {"imatrix", "write the importance matrix that llama-quantize takes"},
    {0}};

static const qc_opt_note qcalib_examples[] = {
    {"qcalib make models/Qwen3-0.6B --text c.txt --preset standard -o c.qcs",
     "statistics from 128 windows of 2048 tokens"},
    {"qcalib make models/Qwen3-0.6B --text c.txt --shard 1/2 -o 1.qcs",
     "the first half; another machine does --shard 2/2"},
    {"qcalib merge 1.qcs 2.qcs -o c.qcs", "the same file as from one run"},
    {0}};

const qc_program qc_program_qcalib = {
    .name = "qcalib",
    .summary = "calibration statistics of a model, for many recipes",
    .synopsis = qcalib_synopsis,
    .description =
        "Run the 16-bit model over windows of a calibration text once and keep the sums of the inputs of "
        "every "
        "matrix: products of all pairs of inputs, absolute values, maxima, tokens. Recipes take the file "
        "with "
        "calibration.statistics.\n\n"
        "The text is a .txt file, a .jsonl file with a `text` or chat `messages` per line, or a .npy file of "
        "token ids. The perplexity of the model on the first of it is printed before the run: a high one "
        "says "
        "that checkpoint, config and tokenizer may not belong together.\n\n"
        "docs/methods/calibration.md says how windows are chosen and what the sums are, "
        "docs/formats/statistics.md how they are stored; both are installed in share/doc/qconvert.",
    .commands = qcalib_commands,
    .opts = qcalib_opts,
    .examples = qcalib_examples,
    .max_operands = 10000,
};

/* ---- qreport ---- */

static const qc_opt qreport_opts[] = {
    {"format", .group = "Output", .command = "render|compare|gate", .arg = "FORMAT", .deflt = "text",
     .help = "text; markdown, which fits a comment of a pull request; html (render), one page with plots; "
             "junit (render, gate), "
             "gates as test cases; json (compare, gate)"},
    {"output", 'o', .command = "render|compare|gate", .arg = "FILE", .help = "write there, not to stdout"},
    {"force", 'f', .command = "render|compare|gate", .help = "replace an output that exists"},
    {"tolerance", .group = "Comparison", .command = "compare", .arg = "FRACTION", .deflt = "1e-6",
     .help = "figures that are further apart, as a fraction of the larger, differ"},
    {"other-model", .command = "compare|gate",
     .help = "the reports may be of different models; text and tokenizer must be the same all the same"},
    {"gates", .group = "Gates", .command = "gate", .arg = "FILE", .help = "gates as YAML"},
    {"baseline", .command = "gate", .arg = "FILE", .help = "report to compare with, of an earlier release"},
    {0}};

static const char *const qreport_synopsis[] = {
    "render REPORT.json... [OPTION...]", "compare A.json B.json [OPTION...]",
    "gate REPORT.json --gates GATES.yaml [OPTION...]", "schema", NULL};

static const qc_opt_note qreport_commands[] = {
    {"render", "show one report, or several in one page"},
    {"compare", "tell what differs between two reports; exit code 1 if a figure does. Time and memory are "
                "shown and do not count"},
    {"gate", "judge a report by limits and against a baseline; exit code 1 if a gate fails"},
    {"schema", "print the JSON Schema of reports"},
    {0}};

static const qc_opt_note qreport_examples[] = {
    {"qreport render report.json --format html -o report.html", "a page to look at"},
    {"qreport render int8.json int4.json --format html -o all.html",
     "two outputs with a plot of size against damage"},
    {"qreport gate report.json --gates gates.yaml --baseline last.json", "decide a release"},
    {0}};

const qc_program qc_program_qreport = {
    .name = "qreport",
    .summary = "show, compare and judge the reports of qconvert",
    .synopsis = qreport_synopsis,
    .description = "Read reports that qconvert --report wrote, check them against their schema, show them, "
                   "compare them and judge them. A "
                   "report of a newer schema is refused (exit code 4), and so are comparisons of reports "
                   "whose hashes say that they are of "
                   "another model, tokenizer or text (exit code 3).\n\n"
                   "docs/report.md says what the figures mean, docs/gates.md how gates are written and "
                   "decided; both are installed in "
                   "share/doc/qconvert.",
    .commands = qreport_commands,
    .opts = qreport_opts,
    .examples = qreport_examples,
    .max_operands = 1000,
    .judges = true,
};
