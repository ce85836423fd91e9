/* Where the bundled model and text are: an installed program finds them beside itself, one that runs from the
 * build folder in the source tree. */
#ifndef QC_CLI_DATADIR_H
#define QC_CLI_DATADIR_H

#include "qc_err.h"

/* Owned paths of the demo model's folder / the bundled held-out text / the one to calibrate with. QC_E_INPUT
 * if the data are not installed. */
int qc_demo_model(char **ret, qc_err *err) QC_WARN_UNUSED;
int qc_demo_text(char **ret, qc_err *err) QC_WARN_UNUSED;
int qc_demo_calibration(char **ret, qc_err *err) QC_WARN_UNUSED;

#endif
