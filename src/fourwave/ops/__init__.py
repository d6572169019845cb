"""Operations: one folder each, with its public function, problem description, reference and kernels."""
