/* Option tables of the programs. */
#ifndef QC_CLI_PROGRAMS_H
#define QC_CLI_PROGRAMS_H

#include "opt.h"

extern const qc_program qc_program_qconvert;
extern const qc_program qc_program_qinspect;
extern const qc_program qc_program_qeval;
extern const qc_program qc_program_qcalib;
extern const qc_program qc_program_qreport;

#endif
