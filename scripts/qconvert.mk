# Quantized models from a Makefile: include this file (installed as share/qconvert/qconvert.mk) and ask for
#
#   MODEL.int8.qpk       8 bit         of the checkpoint folder MODEL, as models/Qwen3-0.6B.int8.qpk
#   MODEL.int4.qpk       4 bit, rounded
#   MODEL.int4-gptq      4 bit, calibrated (QC_CALIB), as a GPTQ folder for engines
#   MODEL.q4_k_m.gguf    Q4_K_M
#   report-MODEL.KIND    MODEL.KIND.html and .md; KIND is int8, int4, int4-gptq or q4_k_m
#   gate-MODEL.KIND      judge MODEL.KIND.json by the gates of the kind, against its baseline if there is one; writes MODEL.KIND.xml
#   baseline-MODEL.KIND  make the present report the baseline
#
# In a folder the last three stand behind it: models/gate-Qwen3-0.6B.int8.
#
# An output is made anew when a file of the checkpoint, a text, the program or an option changed, else not. Needs GNU make 4; safe with
# -j. The file switches .SECONDEXPANSION and .SECONDARY on.

QCONVERT ?= qconvert
QREPORT ?= qreport

# Options for all kinds (as --threads 4), and of each kind.
QC_OPTIONS ?=
QC_INT8_OPTIONS ?= --bits 8 --group channel
QC_INT4_OPTIONS ?= --bits 4 --group 128
QC_INT4_GPTQ_OPTIONS ?= --bits 4 --group 128 --method gptq
QC_Q4_K_M_OPTIONS ?=

# Text to calibrate with, text to measure with (empty: the one that comes with the program).
QC_CALIB ?=
QC_TEXT ?=

# Gates (docs/gates.md), and the folder of baselines, which belongs under version control.
QC_GATES_INT8 ?= gates-int8.yaml
QC_GATES_INT4 ?= gates-int4.yaml
QC_BASELINES ?= baselines

# What was asked for last time, one file per output.
QC_STATE ?= .qconvert

qc_program := $(wildcard $(shell command -v $(QCONVERT) 2>/dev/null))
qc_reporter := $(wildcard $(shell command -v $(QREPORT) 2>/dev/null))
qc_all = $(if $(QC_TEXT),--text $(QC_TEXT)) $(QC_OPTIONS)
qc_options.int8 = $(QC_INT8_OPTIONS) $(qc_all)
qc_options.int4 = $(QC_INT4_OPTIONS) $(qc_all)
qc_options.int4-gptq = --format gptq $(QC_INT4_GPTQ_OPTIONS) $(if $(QC_CALIB),--calib $(QC_CALIB)) $(qc_all)
qc_options.q4_k_m = --format gguf --type q4_k_m $(QC_Q4_K_M_OPTIONS) $(qc_all)

# Files of checkpoint $1 that may change a result. config.json is named without looking, so that a folder that is not there
# is an error.
qc_inputs = $1/config.json $(wildcard $1/*.safetensors $1/*.index.json $1/tokenizer*.json $1/generation_config.json)
qc_state = $(QC_STATE)/$(subst /,_,$1).options
qc_quote = '$(subst ','\'',$1)'
qc_judge = $(QREPORT) gate $1 --gates $2 $(addprefix --baseline ,$(wildcard $(QC_BASELINES)/$(notdir $1)))

.SECONDEXPANSION:
.SECONDARY:
.PHONY: qc-always

# $1: kind, $2: what follows it in the name of the output, $3: its gates, $4: the text that it is calibrated with. The file
# of options changes only where they do.
define qc_kind
$(QC_STATE)/%.$1.options: qc-always
	@mkdir -p $$(@D)
	@printf '%s\n' $$(call qc_quote,$$(qc_options.$1)) >$$@.new
	@if cmp -s $$@.new $$@; then rm $$@.new; else mv $$@.new $$@; fi

%.$1$2 %.$1.json: $$$$(call qc_inputs,$$$$*) $$$$(call qc_state,$$$$*.$1) $(qc_program) $(QC_TEXT) $4
	$$(QCONVERT) $$* $$(qc_options.$1) -o $$*.$1$2 --report $$*.$1.json --force --no-progress

%.$1.html %.$1.md: %.$1.json $(qc_reporter)
	$$(QREPORT) render $$< --format html -o $$*.$1.html --force
	$$(QREPORT) render $$< --format markdown -o $$*.$1.md --force

report-%.$1: %.$1.html %.$1.md ;

gate-%.$1: %.$1.json $(qc_reporter) $3
	$$(call qc_judge,$$<,$3) --format junit -o $$*.$1.xml --force || true
	$$(call qc_judge,$$<,$3)

baseline-%.$1: %.$1.json
	@mkdir -p $$(QC_BASELINES)
	cp $$< $$(QC_BASELINES)/.$$(<F).new
	mv $$(QC_BASELINES)/.$$(<F).new $$(QC_BASELINES)/$$(<F)
endef

$(eval $(call qc_kind,int8,.qpk,$(QC_GATES_INT8)))
$(eval $(call qc_kind,int4,.qpk,$(QC_GATES_INT4)))
$(eval $(call qc_kind,int4-gptq,,$(QC_GATES_INT4),$(QC_CALIB)))
$(eval $(call qc_kind,q4_k_m,.gguf,$(QC_GATES_INT4)))
