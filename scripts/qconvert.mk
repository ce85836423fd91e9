# Quantized models from a Makefile: include this file (installed as share/qconvert/qconvert.mk) and ask for
#
#   MODEL.int8.qpk        8 bit        of the checkpoint folder MODEL, as models/Qwen3-0.6B.int8.qpk
#   MODEL.int4.qpk        4 bit, rounded
#   MODEL.int4-gptq.qpk   4 bit, calibrated (QC_CALIB)
#   report-MODEL.KIND     MODEL.KIND.html and .md, KIND being int8, int4 or int4-gptq
#   gate-MODEL.KIND       judge MODEL.KIND.json by the gates of the kind, against its baseline if there is one; MODEL.KIND.xml
#   baseline-MODEL.KIND   make the present report the baseline
#
# Made anew when a file of the checkpoint, a text, a program or an option changed, else not. Needs GNU make 4; safe with -j.
# The file switches .SECONDEXPANSION and .SECONDARY on.

QCONVERT ?= qconvert
QREPORT ?= qreport

# Options for all kinds (as --threads 4), and of each kind.
QC_OPTIONS ?=
QC_INT8_OPTIONS ?= --bits 8 --group channel
QC_INT4_OPTIONS ?= --bits 4 --group 128
QC_INT4_GPTQ_OPTIONS ?= --bits 4 --group 128 --method gptq

# Text to calibrate with, text to measure with (empty: the one that comes with the program).
QC_CALIB ?=
QC_TEXT ?=

# Gates (docs/gates.md), and the folder of baselines, which belongs under version control.
QC_GATES_INT8 ?= gates-int8.yaml
QC_GATES_INT4 ?= gates-int4.yaml
QC_GATES_INT4_GPTQ ?= $(QC_GATES_INT4)
QC_BASELINES ?= baselines

# What was asked for last time, one file per output.
QC_STATE ?= .qconvert

qc_programs := $(wildcard $(shell command -v $(QCONVERT) 2>/dev/null))
qc_reporter := $(wildcard $(shell command -v $(QREPORT) 2>/dev/null))
qc_text_options = $(if $(QC_TEXT),--text $(QC_TEXT))
qc_calib_options = $(if $(QC_CALIB),--calib $(QC_CALIB))
qc_options.int8 = $(QC_INT8_OPTIONS) $(qc_text_options) $(QC_OPTIONS)
qc_options.int4 = $(QC_INT4_OPTIONS) $(qc_text_options) $(QC_OPTIONS)
qc_options.int4-gptq = $(QC_INT4_GPTQ_OPTIONS) $(qc_calib_options) $(qc_text_options) $(QC_OPTIONS)
qc_gates.int8 = $(QC_GATES_INT8)
qc_gates.int4 = $(QC_GATES_INT4)
qc_gates.int4-gptq = $(QC_GATES_INT4_GPTQ)

# Files of checkpoint $1 that may change a result. config.json is named without looking, so that a folder that is not there
# is an error.
qc_inputs = $1/config.json $(wildcard $1/*.safetensors $1/*.index.json $1/tokenizer*.json $1/generation_config.json)
qc_state = $(QC_STATE)/$(subst /,_,$1).options
qc_quote = '$(subst ','\'',$1)'
qc_baseline = $(wildcard $(QC_BASELINES)/$(notdir $1).json)

.SECONDEXPANSION:
.PHONY: qc-always

# $1: kind. The file of options changes only where they do; what follows from a report is made from the report alone.
define qc_kind
$(QC_STATE)/%.$1.options: qc-always
	@mkdir -p $$(@D)
	@printf '%s\n' $$(call qc_quote,$$(qc_options.$1)) >$$@.new
	@if cmp -s $$@.new $$@; then rm $$@.new; else mv $$@.new $$@; fi

%.$1.qpk %.$1.json: $$$$(call qc_inputs,$$$$*) $$$$(call qc_state,$$$$*.$1) $(qc_programs) $(QC_TEXT) $(if $(findstring gptq,$1),$(QC_CALIB))
	$$(QCONVERT) $$* $$(qc_options.$1) -o $$*.$1.qpk --report $$*.$1.json --force --no-progress

%.$1.html %.$1.md: %.$1.json $(qc_reporter)
	$$(QREPORT) render $$< --format html -o $$*.$1.html --force
	$$(QREPORT) render $$< --format markdown -o $$*.$1.md --force

report-%.$1: %.$1.html %.$1.md ;

gate-%.$1: %.$1.json $(qc_reporter) $$(qc_gates.$1)
	$$(call qc_judge,$$<,$$(qc_gates.$1),$$*.$1) --format junit -o $$*.$1.xml --force || true
	$$(call qc_judge,$$<,$$(qc_gates.$1),$$*.$1)

baseline-%.$1: %.$1.json
	@mkdir -p $$(QC_BASELINES)
	cp $$< $$(QC_BASELINES)/.$$(<F).new
	mv $$(QC_BASELINES)/.$$(<F).new $$(QC_BASELINES)/$$(<F)
endef

qc_judge = $(QREPORT) gate $1 --gates $2 $(addprefix --baseline ,$(call qc_baseline,$3))

$(foreach kind,int8 int4 int4-gptq,$(eval $(call qc_kind,$(kind))))

# What was asked for stays, although it is made on the way to something else.
.SECONDARY:
